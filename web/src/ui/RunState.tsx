// The state of a run as a word with a sign, and how far it is.

import type { Finding, Num, RunState as State } from "../api/types";
import { number, plain, pretty } from "../format";
import { named, t } from "../i18n";
import { told } from "../i18n/told";
import { links } from "../route";
import { Icon, type IconName } from "./Icon";

const LOOK: Record<State, { tone: string; icon: IconName }> = {
  running: { tone: "live", icon: "play" },
  finished: { tone: "good", icon: "check" },
  interrupted: { tone: "warn", icon: "pause" },
  killed: { tone: "bad", icon: "close" },
  damaged: { tone: "bad", icon: "damaged" },
};

export function RunState({ state }: { state: State }) {
  const look = LOOK[state] ?? { tone: "", icon: "info" as const };
  return (
    <span class={`tag ${look.tone}`}>
      <Icon name={look.icon} />
      {named("run", state)}
    </span>
  );
}

export function Progress({ step, total }: { step: Num; total: Num }) {
  const share = step !== null && total ? Math.min(1, step / total) : 0;
  return (
    <span class="progress">
      <span class="num">
        {number(step)}
        {total ? <span class="dim"> / {number(total)}</span> : null}
      </span>
      {total ? (
        <span class="progress-track" aria-hidden="true">
          <span style={{ width: `${share * 100}%` }} />
        </span>
      ) : null}
    </span>
  );
}

const LEVELS: Record<string, string> = { error: "bad", warning: "warn", note: "info", info: "info" };

/** Findings of doctor or check; those of a step lead to its rollouts. */
export function Findings({ findings, run }: { findings: Finding[]; run?: string }) {
  return (
    <ul class="findings">
      {findings.map((finding) => (
        <li class={`finding ${LEVELS[finding.level] ?? "info"}`}>
          <div class="row">
            <span class={`tag ${LEVELS[finding.level] === "info" ? "" : (LEVELS[finding.level] ?? "")}`}>
              {named("level", finding.level)}
            </span>
            <code>{finding.rule}</code>
            {finding.key ? <code class="dim">{finding.key}</code> : null}
            {run && typeof finding.step === "number" ? (
              <a href={links.step(run, finding.step)}>{t("word.stepn", { step: number(finding.step) })}</a>
            ) : null}
          </div>
          {finding.title ? <p class="title">{told(finding.title)}</p> : null}
          <p class="text">{finding.message}</p>
          {finding.fix ? <p class="text fix">{finding.fix}</p> : null}
          {finding.evidence && plain(finding.evidence) !== "{}" && plain(finding.evidence) !== "[]" ? (
            <details class="small">
              <summary>{t("overview.evidence")}</summary>
              <pre>{pretty(finding.evidence)}</pre>
            </details>
          ) : null}
        </li>
      ))}
    </ul>
  );
}
