// Deep links: `#/run/ID/rollouts?step=3` is a path of words and a query.

import { signal } from "@preact/signals";

export interface Route {
  path: string[];
  query: URLSearchParams;
}

function current(): Route {
  const hash = window.location.hash.replace(/^#\/?/, "");
  const cut = hash.indexOf("?");
  const words = cut < 0 ? hash : hash.slice(0, cut);
  const query = new URLSearchParams(cut < 0 ? "" : hash.slice(cut + 1));
  const path = words.split("/").filter(Boolean).map(decode);
  return { path: path.length ? path : ["runs"], query };
}

function decode(word: string): string {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

export const route = signal<Route>(current());
window.addEventListener("hashchange", () => (route.value = current()));

type Value = string | number | null | undefined;

/** The hash of a screen. */
export function link(path: (string | number)[], query: Record<string, Value | Value[]> = {}): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") search.append(name, String(one));
    }
  }
  const words = search.toString();
  return `#/${path.map((word) => encodeURIComponent(word)).join("/")}${words ? `?${words}` : ""}`;
}

export function go(hash: string): void {
  window.location.hash = hash;
}

/** Changes the query of this screen without a new entry of the history. */
export function setQuery(changes: Record<string, Value>): void {
  const { path, query } = route.peek();
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") next.delete(name);
    else next.set(name, String(value));
  }
  const words = next.toString();
  const hash = `#/${path.map((word) => encodeURIComponent(word)).join("/")}${words ? `?${words}` : ""}`;
  window.history.replaceState(null, "", hash);
  route.value = { path, query: next };
}

/** Links of a run's screens, where numbers lead to the rollouts behind them. */
export const links = {
  run: (id: string, screen?: string) => link(screen ? ["run", id, screen] : ["run", id]),
  rollouts: (id: string, query: Record<string, Value> = {}) => link(["run", id, "rollouts"], query),
  step: (id: string, step: number) => link(["run", id, "rollouts"], { start: step, end: step }),
  rollout: (id: string, split: string, step: number, index: number, query: Record<string, Value> = {}) =>
    link(["run", id, "rollout", split, step, index], query),
  group: (id: string, split: string, step: number, group: string | number) =>
    link(["run", id, "group", split, step, group]),
};
