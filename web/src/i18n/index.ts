// Words of the page. `en` names the keys; a language that lacks one does not compile.

import { language } from "../settings";
import { en } from "./en";
import { vi } from "./vi";

export type Key = keyof typeof en;

const words = { en, vi };

/** The text of a key, with `{name}` replaced by the parameter of that name. */
export function t(key: Key, parameters: Record<string, string | number> = {}): string {
  const text: string = words[language.value][key];
  return text.replace(/\{(\w+)\}/g, (whole, name: string) =>
    name in parameters ? String(parameters[name]) : whole,
  );
}

/** The text of a key made of a word that the server sends, or the word itself. */
export function named(prefix: string, word: string): string {
  const key = `${prefix}.${word}`;
  return key in en ? t(key as Key) : word;
}
