// Commands that can be copied, and titles of screens.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { t } from "../i18n";
import { Icon } from "./Icon";

async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // without permission for the clipboard: the old way, a selected text field
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

export function CopyButton({ text, label }: { text: string; label?: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    window.setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button onClick={copy} aria-label={label ? undefined : t("action.copy")} title={t("action.copy")}>
      <Icon name={copied ? "check" : "copy"} />
      {label ? <span>{copied ? t("action.copied") : label}</span> : null}
      <span class="hidden" role="status">
        {copied ? t("action.copied") : ""}
      </span>
    </button>
  );
}

export function Command({ text }: { text: string }) {
  return (
    <div class="command">
      <code>{text}</code>
      <CopyButton text={text} />
    </div>
  );
}

export function Section(props: { title: string; aside?: ComponentChildren; children: ComponentChildren }) {
  return (
    <section class="stack tight">
      <div class="row between">
        <h2>{props.title}</h2>
        {props.aside}
      </div>
      {props.children}
    </section>
  );
}
