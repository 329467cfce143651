// The keyboard: `/` search, j and k rows, `?` help. Typing in a field is typing.

import { useEffect } from "preact/hooks";

export function typing(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  return target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
}

/** Calls `take` with a key that is pressed outside of fields; true means that it was for us. */
export function useKeys(take: (key: string, event: KeyboardEvent) => boolean): void {
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
      if (document.querySelector("dialog[open]")) return;
      if (take(event.key, event)) event.preventDefault();
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });
}

/** Moves the focus among the elements that are marked as rows. */
export function moveRow(by: number): boolean {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  if (rows.length === 0) return false;
  const now = rows.findIndex((row) => row.contains(document.activeElement));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? 0 : now + by))]!;
  const goal = next.matches("a,button,[tabindex]") ? next : next.querySelector<HTMLElement>("a,button,summary,input,select");
  goal?.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}

export function focusSearch(): boolean {
  const field = document.querySelector<HTMLInputElement>("[data-search]");
  if (field === null) return false;
  field.focus();
  field.select();
  return true;
}
