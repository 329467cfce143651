// Text of a policy, a tool or a user: always text, cut where it is very long.

import { useState } from "preact/hooks";
import { number, visible } from "../format";
import { t } from "../i18n";

const LIMIT = 6000;

export function LongText({ text, mono }: { text: string; mono?: boolean }) {
  const [whole, setWhole] = useState(false);
  const shown = whole || text.length <= LIMIT ? text : text.slice(0, LIMIT);
  return (
    <div>
      <div class={`text${mono ? " mono" : ""}`} dir="auto">
        {visible(shown)}
      </div>
      {shown.length < text.length ? (
        <button class="wrapping" onClick={() => setWhole(true)}>{t("text.all", { count: number(text.length) })}</button>
      ) : null}
    </div>
  );
}

/** A link to the same data as JSON: every screen has one. */
export function JsonLink({ path }: { path: string }) {
  return (
    <a class="small json" href={`/api/v1${path}`} target="_blank" rel="noreferrer">
      JSON
    </a>
  );
}
