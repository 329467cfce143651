// The rollouts of one prompt side by side, and why they taught something or nothing.

import { useApi } from "../api/client";
import type { Group as Data } from "../api/types";
import { fixed, groupName, number, visible } from "../format";
import { named, t } from "../i18n";
import { told } from "../i18n/told";
import { links } from "../route";
import { JsonLink, LongText } from "../ui/LongText";
import { Empty, Loaded, Notice } from "../ui/State";
import { Advantage } from "./Rollouts";
import { useRun } from "./Run";

export function Group({ split, step, group }: { split: string; step: string; group: string }) {
  const { run } = useRun();
  const path = `/runs/${encodeURIComponent(run.id)}/groups/${split}/${step}/${encodeURIComponent(group)}`;
  const answer = useApi<Data>(path);
  return (
    <Loaded answer={answer}>
      {(data) =>
        data.rows.length === 0 ? (
          <Empty title={t("rollouts.empty")} />
        ) : (
          <div class="stack">
            <div class="row between">
              <h2>
                {t("group.title", { group: groupName(group), step })} <span class="dim">{split === "validation" ? t("split.validation") : ""}</span>
              </h2>
              <div class="row">
                <span>
                  {t("group.mean")} <strong>{number(data.mean)}</strong>
                </span>
                <span>
                  {t("group.std")} <strong>{fixed(data.std)}</strong>
                </span>
                <JsonLink path={path} />
              </div>
            </div>
            {data.reason ? <Notice>{told(data.reason)}</Notice> : null}
            <div class="card">
              <h3>{t("word.prompt")}</h3>
              <LongText text={data.rows[0]!.prompt} />
            </div>
            <div class="siblings">
              {data.rows.map((row) => (
                <a data-row class="card sibling" href={links.rollout(run.id, row.split, row.step, row.index)}>
                  <div class="row between">
                    <span>
                      <span class="dim small">{t("word.reward")}</span> <strong class="num">{number(row.reward)}</strong>
                    </span>
                    <span>
                      <span class="dim small">{t("word.advantage")}</span> <Advantage value={row.advantage} />
                    </span>
                  </div>
                  <div class="dim small">
                    {[t("word.ntokens", { count: number(row.tokens) }), row.stop ? named("stop", row.stop) : null, ...row.tools.map(visible)].filter(Boolean).join(" · ")}
                  </div>
                  {row.fault ? <span class="tag bad long">{row.fault}</span> : null}
                  <div class="text small sibling-text">{visible((row.text ?? row.answer).slice(0, 4000))}</div>
                </a>
              ))}
            </div>
          </div>
        )
      }
    </Loaded>
  );
}
