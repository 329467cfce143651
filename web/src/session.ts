// What the server said of itself, once: which folder, which screens it serves, whether it may act.

import { computed, signal } from "@preact/signals";
import { ApiError, BASE, get } from "./api/client";
import type { Session } from "./api/types";

export const session = signal<Session | null>(null);
export const sessionError = signal<ApiError | null>(null);
const served = signal<ReadonlySet<string>>(new Set());

/** A path without the names of its parameters: `/runs/{}/log`. */
function shape(path: string): string {
  return path.replace(BASE, "").replace(/\{[^}]*\}/g, "{}");
}

/** Whether the server answers a path such as `/runs/{}/log`; a screen without its path is not shown. */
export function serves(path: string): boolean {
  return served.value.has(path);
}

/** Whether the server starts runs; one that only reads has no such path. */
export const acting = computed(() => session.value?.read_only === false && served.value.has("/jobs"));

export async function openSession(): Promise<void> {
  try {
    const [found, api] = await Promise.all([
      get<Session>("/session"),
      get<{ paths: Record<string, unknown> }>("/openapi.json"),
    ]);
    served.value = new Set(Object.keys(api.paths).map(shape));
    session.value = found;
    sessionError.value = null;
  } catch (error) {
    if (error instanceof ApiError) sessionError.value = error;
    else throw error;
  }
}
