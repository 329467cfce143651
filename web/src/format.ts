// Numbers, times and sizes for people, in the language of the page.

import { language } from "./settings";

const NONE = "–";

function locale(): string {
  return language.value === "vi" ? "vi-VN" : "en-GB";
}

/** Four significant digits; very small and very large numbers with an exponent. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString(locale());
  if (size >= 1000) return Math.round(value).toLocaleString(locale());
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return value.toLocaleString(locale(), { maximumSignificantDigits: 4 });
}

export function fixed(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return value.toLocaleString(locale(), { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A score with its sign, as advantages are read. */
export function signed(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return (value > 0 ? "+" : "") + fixed(value, 3);
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  return share.toLocaleString(locale(), { style: "percent", maximumFractionDigits: 1 });
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toLocaleString(locale(), { maximumFractionDigits: 1 })} s`;
  const [minutes, hours] = language.value === "vi" ? ["phút", "giờ"] : ["min", "h"];
  if (value < 7200) return `${Math.round(value / 60)} ${minutes}`;
  return `${(value / 3600).toLocaleString(locale(), { maximumFractionDigits: 1 })} ${hours}`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toLocaleString(locale(), { maximumFractionDigits: size < 10 ? 2 : 1 })} ${units[unit]}`;
}

/** Seconds since 1970 of a time that may be a number or an ISO date. */
export function epoch(time: string | number | null | undefined): number | null {
  if (time === null || time === undefined || time === "") return null;
  if (typeof time === "number") return time;
  const parsed = Date.parse(time);
  return Number.isNaN(parsed) ? null : parsed / 1000;
}

export function when(time: string | number | null | undefined): string {
  const at = epoch(time);
  if (at === null) return NONE;
  return new Date(at * 1000).toLocaleString(locale(), { dateStyle: "medium", timeStyle: "short" });
}

/** "5 minutes ago", in the words of the language. */
export function ago(time: string | number | null | undefined): string {
  const at = epoch(time);
  if (at === null) return NONE;
  const past = Date.now() / 1000 - at;
  const words = new Intl.RelativeTimeFormat(locale(), { numeric: "auto" });
  if (past < 60) return words.format(-Math.max(0, Math.round(past)), "second");
  if (past < 3600) return words.format(-Math.round(past / 60), "minute");
  if (past < 86400) return words.format(-Math.round(past / 3600), "hour");
  return words.format(-Math.round(past / 86400), "day");
}

/** A value of a configuration or of a manifest as one line of text. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** JSON with indentation where it is a structure, the text itself where it is text. */
export function pretty(value: unknown): string {
  if (typeof value === "string") return value;
  return JSON.stringify(value, null, 2) ?? "";
}

/** `step.draw` of a group that is named `step.draw.prompt`. */
export function groupName(group: string | number | null): string {
  return group === null ? NONE : String(group).split(".").slice(0, 2).join(".");
}

/** The end of a long text, where the question is. */
export function ending(text: string, length = 64): string {
  return text.length <= length ? text : `…${text.slice(-length)}`;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Text whose control characters and direction marks are seen instead of obeyed. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (mark) => {
    const code = mark.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}
