// How far the sampler and the trainer are apart, and the tokens where they are farthest.

import { useMemo } from "preact/hooks";
import { useApi } from "../api/client";
import type { Parity as Data, Series } from "../api/types";
import { fixed, number } from "../format";
import { t } from "../i18n";
import { go, links } from "../route";
import { Chart } from "../ui/Chart";
import { Section } from "../ui/Copy";
import { JsonLink } from "../ui/LongText";
import { Empty, Loaded, Notice } from "../ui/State";
import { useRun } from "./Run";

function Gap({ run, name, series }: { run: string; name: string; series: Series }) {
  const curves = useMemo(() => [{ label: name, series }], [name, series]);
  return (
    <div class="card chart-card">
      <h3>
        <code>{name}</code>
      </h3>
      <Chart title={name} curves={curves} sync={run} onStep={(step) => go(links.step(run, step))} />
    </div>
  );
}

function Worst({ run, data }: { run: string; data: Data }) {
  return (
    <div class="card flush wide" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th>{t("parity.where")}</th>
            <th>{t("rollout.token")}</th>
            <th class="num">{t("stream.sampler_logprob")}</th>
            <th class="num">{t("stream.trainer_logprob")}</th>
            <th class="num">{t("parity.gap")}</th>
          </tr>
        </thead>
        <tbody>
          {data.worst.map((one) => (
            <tr data-row>
              <td>
                <a href={links.rollout(run, "train", one.step, one.index, { token: one.position, colour: "gap" })}>
                  {t("parity.place", { step: number(one.step), index: one.index, position: number(one.position) })}
                </a>
              </td>
              <td>
                <code>{JSON.stringify(one.token)}</code>
              </td>
              <td class="num">{fixed(one.sampler, 4)}</td>
              <td class="num">{fixed(one.trainer, 4)}</td>
              <td class="num">{number(one.gap)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function Parity() {
  const { run, steps } = useRun();
  const path = `/runs/${encodeURIComponent(run.id)}/parity`;
  const answer = useApi<Data>(path, steps);
  return (
    <Loaded answer={answer}>
      {(data) => (
        <div class="stack">
          <p class="dim">{t("parity.what")}</p>
          {data.damage?.length ? (
            <Notice level="bad">
              {data.damage.map((one) => (
                <span class="text">
                  <code>{one.file}</code> {one.message}
                </span>
              ))}
            </Notice>
          ) : null}
          <Section title={t("overview.curves")} aside={<JsonLink path={path} />}>
            {Object.keys(data.series).length ? (
              <div class="grid two">
                {Object.entries(data.series).map(([name, series]) => (
                  <Gap key={name} run={run.id} name={name} series={series} />
                ))}
              </div>
            ) : (
              <Empty title={t("parity.empty")} />
            )}
          </Section>
          <Section title={t("parity.worst")}>
            {data.worst.length ? <Worst run={run.id} data={data} /> : <p class="dim">{t("parity.noworst")}</p>}
          </Section>
        </div>
      )}
    </Loaded>
  );
}
