// What a person chose for this browser: language and theme.

import { effect, signal } from "@preact/signals";

export type Language = "en" | "vi";
export type Theme = "system" | "light" | "dark";

function stored<T extends string>(name: string, allowed: readonly T[], otherwise: T): T {
  try {
    const value = window.localStorage.getItem(`luyen.${name}`);
    return allowed.includes(value as T) ? (value as T) : otherwise;
  } catch {
    return otherwise; // storage may be forbidden
  }
}

function store(name: string, value: string): void {
  try {
    window.localStorage.setItem(`luyen.${name}`, value);
  } catch {
    // the choice lasts as long as the page
  }
}

const spoken: Language = navigator.language.toLowerCase().startsWith("vi") ? "vi" : "en";
export const language = signal<Language>(stored("language", ["en", "vi"], spoken));
export const theme = signal<Theme>(stored("theme", ["system", "light", "dark"], "system"));

const system = window.matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
system.addEventListener("change", () => (systemDark.value = system.matches));

/** Whether the page is dark now; charts are drawn again when it changes. */
export const dark = signal(false);

effect(() => {
  dark.value = theme.value === "dark" || (theme.value === "system" && systemDark.value);
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
  store("theme", theme.value);
});

effect(() => {
  document.documentElement.lang = language.value;
  store("language", language.value);
});
