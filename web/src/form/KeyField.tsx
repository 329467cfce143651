// One key of the configuration: its field, its documentation, the findings about it.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Finding } from "../api/types";
import { t } from "../i18n";
import { shownValue, typed } from "./document";
import type { ConfigKey } from "./schema";

interface Props {
  one: ConfigKey;
  value: unknown;
  findings: Finding[];
  change: (value: unknown) => void;
}

function Input({ one, value, change, id, described }: Props & { id: string; described: string }) {
  const text = shownValue(value);
  const [draft, setDraft] = useState(text);
  const waiting = useRef(0);
  useEffect(() => setDraft(text), [text]);
  const otherwise = one.default === undefined ? "" : shownValue(one.default);
  if (one.kind === "boolean" || one.kind === "choice") {
    const options = one.kind === "boolean" ? ["true", "false"] : one.choices;
    return (
      <select
        id={id}
        aria-describedby={described}
        value={text}
        onChange={(event) => change(typed(event.currentTarget.value, one.kind === "choice" && event.currentTarget.value !== "null"))}
      >
        <option value="">{t("form.default", { value: otherwise || "–" })}</option>
        {options.map((option) => (
          <option value={option}>{option}</option>
        ))}
        {one.nullable && one.default !== null ? <option value="null">null</option> : null}
      </select>
    );
  }
  const take = (words: string) => {
    setDraft(words);
    window.clearTimeout(waiting.current);
    waiting.current = window.setTimeout(() => change(typed(words, one.kind === "text" && words !== "null")), 300);
  };
  return (
    <input
      id={id}
      aria-describedby={described}
      inputMode={one.kind === "integer" ? "numeric" : undefined}
      value={draft}
      placeholder={otherwise}
      onInput={(event) => take(event.currentTarget.value)}
    />
  );
}

export function KeyField(props: Props) {
  const { one, value, findings } = props;
  const id = `key-${one.key}`;
  const worst = findings.some((finding) => finding.level === "error") ? "bad" : findings.length ? "warn" : "";
  return (
    <div class={`key-field ${worst} ${value === undefined ? "" : "set"}`} data-row>
      <label for={id}>
        <code>{one.key}</code>
      </label>
      <div class="key-input">
        <Input {...props} id={id} described={`${id}-help`} />
        {value === undefined ? null : (
          <button class="plain" onClick={() => props.change(undefined)} aria-label={t("form.reset", { key: one.key })} title={t("form.reset", { key: one.key })}>
            ×
          </button>
        )}
      </div>
      <p id={`${id}-help`} class="dim small key-help">
        {one.help}
      </p>
      {findings.map((finding) => (
        <p class={`small ${finding.level === "error" ? "bad-text" : "warn-text"}`} role="alert">
          <code>{finding.rule}</code> {finding.message} {finding.fix ? <strong>{finding.fix}</strong> : null}
        </p>
      ))}
    </div>
  );
}
