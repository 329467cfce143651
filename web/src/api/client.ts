// Requests to the studio's own server. Nothing here reaches another host.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { ErrorBody } from "./types";

export const BASE = "/api/v1";

/** An answer that is no success; status 0 means that no answer came at all. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly body: ErrorBody,
  ) {
    super(body.message);
  }
}

type Values = Record<string, string | number | null | undefined | (string | number)[]>;

/** `path?name=value...`; empty values are left out, lists repeat their name. */
export function withQuery(path: string, values: Values): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (Array.isArray(value)) value.forEach((one) => query.append(name, String(one)));
    else if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const words = query.toString();
  return words ? `${path}?${words}` : path;
}

async function failure(answer: Response): Promise<ApiError> {
  const text = await answer.text();
  try {
    const body = JSON.parse(text) as { error?: Partial<ErrorBody>; detail?: unknown };
    const message = body.error?.message ?? (body.detail ? JSON.stringify(body.detail) : text);
    return new ApiError(answer.status, {
      message: message || answer.statusText,
      field: body.error?.field ?? null,
      fix: body.error?.fix ?? null,
    });
  } catch {
    const message = text.slice(0, 500) || `${answer.status} ${answer.statusText}`;
    return new ApiError(answer.status, { message, field: null, fix: null });
  }
}

async function request(path: string, init: RequestInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(BASE + path, { credentials: "same-origin", ...init });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, { message: String(error), field: null, fix: null });
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await request(path, { signal })).json()) as T;
}

function posted(body: unknown, signal?: AbortSignal): RequestInit {
  return {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Luyen-Studio": "1" },
    body: JSON.stringify(body),
    signal,
  };
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const text = await (await request(path, posted(body, signal))).text();
  return (text ? JSON.parse(text) : null) as T;
}

/** Sends a request and reads the server-sent events of its answer one by one. */
export async function postStream(
  path: string,
  body: unknown,
  take: (event: string, data: unknown) => void,
  signal?: AbortSignal,
): Promise<void> {
  const answer = await request(path, posted(body, signal));
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += (value ?? "").replace(/\r\n/g, "\n");
    const blocks = rest.split("\n\n");
    rest = done ? "" : blocks.pop()!;
    for (const block of blocks) {
      let event = "message";
      const data: string[] = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length) take(event, JSON.parse(data.join("\n")));
    }
    if (done) return;
  }
}

export interface Answer<T> {
  data: T | null;
  error: ApiError | null;
  loading: boolean;
  reload: () => void;
}

/**
 * The answer to a GET; null asks nothing, and a new `version` asks again.
 *
 * The last data stays while newer data is on its way.
 */
export function useApi<T>(path: string | null, version = 0): Answer<T> {
  const [state, setState] = useState<{ path: string | null; data: T | null; error: ApiError | null }>({
    path: null,
    data: null,
    error: null,
  });
  const [turn, setTurn] = useState(0);
  const [loading, setLoading] = useState(path !== null);
  useEffect(() => {
    if (path === null) {
      setState({ path: null, data: null, error: null });
      setLoading(false);
      return;
    }
    const abort = new AbortController();
    setLoading(true);
    get<T>(path, abort.signal).then(
      (data) => {
        setState({ path, data, error: null });
        setLoading(false);
      },
      (error: unknown) => {
        if (abort.signal.aborted) return;
        const known =
          error instanceof ApiError
            ? error
            : new ApiError(0, { message: String(error), field: null, fix: null });
        setState((old) => ({ path, data: old.path === path ? old.data : null, error: known }));
        setLoading(false);
      },
    );
    return () => abort.abort();
  }, [path, turn, version]);
  const reload = useCallback(() => setTurn((n) => n + 1), []);
  return { data: state.data, error: state.error, loading, reload };
}

export type Handlers = Record<string, (data: unknown) => void>;

/**
 * Server-sent events of a path; says whether the stream is open.
 *
 * A hidden tab closes its stream: browsers allow six connections to a server, and more tabs than
 * that would otherwise wait for one another. `missed` is called when the tab is seen again.
 */
export function useEvents(path: string | null, handlers: Handlers, missed?: () => void): boolean {
  const [open, setOpen] = useState(false);
  const latest = useRef({ handlers, missed });
  latest.current = { handlers, missed };
  const names = Object.keys(handlers).sort().join(" ");
  useEffect(() => {
    if (path === null) return;
    let source: EventSource | null = null;
    let retry = 0;
    let seen = false;
    const connect = () => {
      source = new EventSource(BASE + path);
      source.onopen = () => {
        setOpen(true);
        if (seen) latest.current.missed?.();
        seen = true;
      };
      source.onerror = () => {
        setOpen(false);
        if (source?.readyState === EventSource.CLOSED) {
          // an answer that is no stream: what it was about may be gone
          latest.current.missed?.();
          close();
          retry = window.setTimeout(connect, 5000);
        }
      };
      for (const name of names.split(" ")) {
        source.addEventListener(name, (event) => {
          const text = (event as MessageEvent<string>).data;
          latest.current.handlers[name]?.(text ? JSON.parse(text) : null);
        });
      }
    };
    const close = () => {
      window.clearTimeout(retry);
      source?.close();
      source = null;
      setOpen(false);
    };
    const look = () => {
      if (document.hidden) close();
      else if (source === null) connect();
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      document.removeEventListener("visibilitychange", look);
      close();
    };
  }, [path, names]);
  return open;
}
