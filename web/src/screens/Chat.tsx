// Chat with one checkpoint or model, or with two side by side.

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, post, postStream, useApi } from "../api/client";
import type { ChatSource } from "../api/types";
import { number, plain, pretty, seconds, visible } from "../format";
import { t } from "../i18n";
import { route } from "../route";
import { session } from "../session";
import { Icon } from "../ui/Icon";
import { LongText } from "../ui/LongText";
import { Empty, Failure, Loaded, Notice } from "../ui/State";

interface Call {
  name: string;
  arguments: unknown;
  result: unknown;
  status: string;
}

/** What a side of a chat is, as the server takes it. */
type Side = { run_id: string; step: number; tools: boolean } | { url: string; model: string | null; api_key_env: string | null };

interface Turn {
  question: string;
  /** Pieces in their order: what was written, and the calls of tools between. */
  sides: { pieces: (string | Call)[]; note: string }[];
}

function Answer({ side, live }: { side: Turn["sides"][number]; live: boolean }) {
  return (
    <div class="message assistant">
      {side.pieces.map((piece) =>
        typeof piece === "string" ? (
          <LongText text={piece} />
        ) : (
          <div class="message tool small">
            <code>
              {piece.name}({visible(plain(piece.arguments))})
            </code>{" "}
            {piece.status === "ok" ? null : <span class="tag warn">{piece.status}</span>}
            <LongText text={pretty(piece.result)} mono />
          </div>
        ),
      )}
      {live ? <span class="cursor" aria-hidden="true" /> : null}
      {side.note ? <p class="dim small">{side.note}</p> : null}
    </div>
  );
}

const SERVER = "server";

function SourceChoice(props: { id: string; label: string; sources: ChatSource[]; value: string; change: (value: string) => void; none?: string }) {
  return (
    <div class="field grow">
      <label for={props.id}>{props.label}</label>
      <select id={props.id} value={props.value} onChange={(event) => props.change(event.currentTarget.value)}>
        {props.none !== undefined ? <option value="">{props.none}</option> : null}
        <option value={SERVER}>{t("chat.server")}</option>
        {props.sources.map((source, i) => (
          <option value={String(i)}>{source.label}</option>
        ))}
      </select>
    </div>
  );
}

function grown(pieces: (string | Call)[], text: string): (string | Call)[] {
  const end = pieces[pieces.length - 1];
  return typeof end === "string" ? [...pieces.slice(0, -1), end + text] : text ? [...pieces, text] : pieces;
}

/** A chat on the server, its turns, and the answer that is being written. */
function useChat(chosen: Side[]) {
  const [turns, setTurns] = useState<Turn[]>([]);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<ApiError | null>(null);
  const chat = useRef<{ id: string; key: string } | null>(null);
  const abort = useRef<AbortController | null>(null);
  const close = () => {
    abort.current?.abort();
    if (chat.current) void post(`/chats/${chat.current.id}/close`, {}).catch(() => undefined);
    chat.current = null;
  };
  useEffect(() => close, []);
  const last = (side: number, change: (old: Turn["sides"][number]) => Turn["sides"][number]) =>
    setTurns((old) => {
      const turn = old[old.length - 1]!;
      const sides = turn.sides.map((one, i) => (i === side ? change(one) : one));
      return [...old.slice(0, -1), { ...turn, sides }];
    });
  const take = (event: string, data: unknown) => {
    const { side } = data as { side: number };
    if (event === "token") last(side, (old) => ({ ...old, pieces: grown(old.pieces, (data as { text: string }).text) }));
    if (event === "tool") last(side, (old) => ({ ...old, pieces: [...old.pieces, data as Call] }));
    if (event === "done") {
      const { tokens, seconds: time } = data as { tokens: number; seconds: number };
      last(side, (old) => ({ ...old, note: t("chat.done", { tokens: number(tokens), time: seconds(time) }) }));
    }
    if (event === "error") {
      const problem = data as { message?: string; error?: { message: string } };
      last(side ?? 0, (old) => ({ ...old, note: problem.error?.message ?? problem.message ?? "" }));
    }
  };
  const send = async (message: string, temperature: number, maxTokens: number) => {
    setBusy(true);
    setError(null);
    abort.current = new AbortController();
    const key = JSON.stringify(chosen);
    try {
      if (chat.current?.key !== key) {
        close();
        abort.current = new AbortController();
        setTurns([]);
        const { id } = await post<{ id: string }>("/chats", { sources: chosen }, abort.current.signal);
        chat.current = { id, key };
      }
      setTurns((old) => [...old, { question: message, sides: chosen.map(() => ({ pieces: [], note: "" })) }]);
      const body = { message, temperature, max_tokens: maxTokens };
      await postStream(`/chats/${chat.current.id}/messages`, body, take, abort.current.signal);
    } catch (problem) {
      if (problem instanceof ApiError) setError(problem);
      else if (!abort.current?.signal.aborted) throw problem;
    } finally {
      setBusy(false);
    }
  };
  const reset = () => {
    close();
    setTurns([]);
    setError(null);
  };
  return { turns, busy, error, send, stop: () => abort.current?.abort(), reset };
}

function Room({ sources }: { sources: ChatSource[] }) {
  const run = route.value.query.get("run");
  const url = route.value.query.get("url");
  const begin = Math.max(0, sources.findIndex((one) => (url ? one.url === url : run ? one.run_id === run : one.kind === "checkpoint")));
  const [left, setLeft] = useState(sources.length ? String(begin) : SERVER);
  const [right, setRight] = useState("");
  const [tools, setTools] = useState(true);
  const [server, setServer] = useState({ url: `http://${window.location.hostname}:8000/v1`, model: "", api_key_env: "" });
  const [temperature, setTemperature] = useState("0.7");
  const [maxTokens, setMaxTokens] = useState("256");
  const [message, setMessage] = useState("");
  const sideOf = (choice: string): Side => {
    const source = choice === SERVER ? null : sources[Number(choice)]!;
    if (source?.kind === "checkpoint") return { run_id: source.run_id!, step: source.step!, tools: tools && source.tools === true };
    const { url: place, model, api_key_env: key } = source ? { url: source.url!, model: "", api_key_env: "" } : server;
    return { url: place, model: model || null, api_key_env: key || null };
  };
  const choices = [left, right].filter(Boolean);
  const chosen = choices.map(sideOf);
  const hasTools = choices.some((choice) => choice !== SERVER && sources[Number(choice)]!.tools);
  const { turns, busy, error, send, stop, reset } = useChat(chosen);
  const submit = (event: Event) => {
    event.preventDefault();
    if (!message.trim() || busy) return;
    setMessage("");
    void send(message, Number(temperature), Number(maxTokens));
  };
  return (
    <div class="stack chat">
      <div class="card row ends choices">
        <SourceChoice id="left" label={t("chat.left")} sources={sources} value={left} change={setLeft} />
        <SourceChoice id="right" label={t("chat.right")} sources={sources} value={right} change={setRight} none={t("chat.none")} />
        <div class="field short">
          <label for="temperature">{t("chat.temperature")}</label>
          <input id="temperature" type="number" min="0" max="2" step="0.1" value={temperature} onInput={(event) => setTemperature(event.currentTarget.value)} />
        </div>
        <div class="field short">
          <label for="max-tokens">{t("chat.maxtokens")}</label>
          <input id="max-tokens" type="number" min="1" value={maxTokens} onInput={(event) => setMaxTokens(event.currentTarget.value)} />
        </div>
        <button onClick={reset}>{t("chat.reset")}</button>
        {hasTools ? (
          <label class="row toolbar beside-input">
            <input id="chat-tools" type="checkbox" checked={tools} onChange={(event) => setTools(event.currentTarget.checked)} /> {t("chat.tools")}
          </label>
        ) : null}
      </div>
      {choices.includes(SERVER) ? (
        <div class="card row">
          {(["url", "model", "api_key_env"] as const).map((name) => (
            <div class="field grow">
              <label for={`server-${name}`}>{t(`chat.server.${name}`)}</label>
              <input
                id={`server-${name}`}
                value={server[name]}
                onInput={(event) => setServer({ ...server, [name]: event.currentTarget.value })}
              />
            </div>
          ))}
        </div>
      ) : null}
      {session.value?.trust === false ? <p class="dim small">{t("chat.trust")}</p> : null}
      <div class="turns" aria-live="polite">
        {turns.length === 0 ? <Empty title={t("chat.begin")} /> : null}
        {turns.map((turn, i) => (
          <div class="turn stack tight">
            <div class="message user">
              <LongText text={turn.question} />
            </div>
            <div class={turn.sides.length > 1 ? "columns" : ""}>
              {turn.sides.map((side) => (
                <Answer side={side} live={busy && i === turns.length - 1 && side.note === ""} />
              ))}
            </div>
          </div>
        ))}
      </div>
      {error ? <Failure error={error} /> : null}
      <form class="row ends compose" onSubmit={submit}>
        <textarea
          class="grow"
          rows={2}
          aria-label={t("chat.message")}
          placeholder={t("chat.message")}
          value={message}
          onInput={(event) => setMessage(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
          }}
        />
        {busy ? (
          <button type="button" onClick={stop}>
            <Icon name="stop" /> {t("chat.stop")}
          </button>
        ) : (
          <button class="primary" disabled={!message.trim()}>
            {t("chat.send")}
          </button>
        )}
      </form>
    </div>
  );
}

export function Chat() {
  const answer = useApi<ChatSource[] | { sources: ChatSource[] }>("/chats/sources");
  return (
    <div class="stack">
      <h1>{t("nav.chat")}</h1>
      {answer.error?.status === 404 ? (
        <Notice>{t("chat.absent")}</Notice>
      ) : (
        <Loaded answer={answer}>
          {(data) => {
            const sources = Array.isArray(data) ? data : data.sources;
            return (
              <>
                {sources.length ? null : <p class="dim">{t("chat.nosource")}</p>}
                <Room sources={sources} />
              </>
            );
          }}
        </Loaded>
      )}
    </div>
  );
}
