// Components of the reward over time, faults of scoring, answers of judges.

import { useMemo } from "preact/hooks";
import { useApi } from "../api/client";
import type { Rewards as Data } from "../api/types";
import { number, seconds } from "../format";
import { t } from "../i18n";
import { go, links } from "../route";
import { Chart } from "../ui/Chart";
import { Section } from "../ui/Copy";
import { JsonLink, LongText } from "../ui/LongText";
import { Empty, Loaded } from "../ui/State";
import { useRun } from "./Run";

function Components({ run, data }: { run: string; data: Data }) {
  return (
    <div class="grid two">
      {data.components.map((one) => (
        <Component key={one.name} run={run} one={one} />
      ))}
    </div>
  );
}

function Component({ run, one }: { run: string; one: Data["components"][number] }) {
  const curves = useMemo(() => [{ label: one.name, series: one.series }], [one]);
  return (
    <div class="card chart-card">
      <h3>
        <code>{one.name}</code>
      </h3>
      <Chart title={one.name} curves={curves} sync={run} onStep={(step) => go(links.step(run, step))} />
    </div>
  );
}

function FaultTable({ run, data }: { run: string; data: Data }) {
  return (
    <div class="card flush wide" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th class="num">{t("word.step")}</th>
            <th>{t("word.fault")}</th>
            <th class="num">{t("word.count")}</th>
            <th>
              <span class="hidden">{t("rewards.sample")}</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {data.faults.map((one) => (
            <tr data-row>
              <td class="num">
                <a href={links.rollouts(run, { start: one.step, end: one.step, fault: one.name })}>{number(one.step)}</a>
              </td>
              <td>
                <span class="tag bad long">{one.name}</span>
              </td>
              <td class="num">{number(one.count)}</td>
              <td>
                {one.sample !== null ? <a href={links.rollout(run, "train", one.step, one.sample)}>{t("rewards.sample")}</a> : null}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Judges({ run, data }: { run: string; data: Data }) {
  return (
    <div class="stack tight">
      {data.judges.map((one) => (
        <details class="card" data-row>
          <summary>
            <span class="row">
              {one.fault ? <span class="tag bad long">{one.fault}</span> : <strong class="num">{number(one.score)}</strong>}
              <code>{one.component}</code>
              <span>{t("rollout.title", { step: number(one.step), index: one.index })}</span>
              <span class="dim small">{seconds(one.seconds)}</span>
            </span>
          </summary>
          <a class="small" href={links.rollout(run, "train", one.step, one.index)}>
            {t("rewards.sample")}
          </a>
          <div class="columns small padded">
            <div>
              <span class="dim">{t("rewards.answer")}</span>
              <LongText text={one.answer} />
            </div>
            <div>
              <span class="dim">{t("rewards.reply")}</span>
              <LongText text={one.reply} />
            </div>
          </div>
        </details>
      ))}
    </div>
  );
}

export function Rewards() {
  const { run, steps } = useRun();
  const path = `/runs/${encodeURIComponent(run.id)}/rewards`;
  const answer = useApi<Data>(path, steps);
  return (
    <Loaded answer={answer}>
      {(data) => (
        <div class="stack">
          <Section title={t("rewards.components")} aside={<JsonLink path={path} />}>
            {data.components.length ? <Components run={run.id} data={data} /> : <Empty title={t("rewards.nocomponents")} />}
          </Section>
          <Section title={t("rewards.faults")}>
            {data.faults.length ? <FaultTable run={run.id} data={data} /> : <p class="dim">{t("rewards.nofaults")}</p>}
          </Section>
          <Section title={t("rewards.judges")}>
            {Object.keys(data.judging ?? {}).length ? (
              <div class="grid two">
                {Object.entries(data.judging ?? {}).map(([name, series]) => (
                  <Component key={name} run={run.id} one={{ name, series }} />
                ))}
              </div>
            ) : null}
            {data.judges.length ? (
              <Judges run={run.id} data={data} />
            ) : (
              <p class="dim">{t("judging/requests" in (data.judging ?? {}) ? "rewards.noreplies" : "rewards.nojudges")}</p>
            )}
          </Section>
        </div>
      )}
    </Loaded>
  );
}
