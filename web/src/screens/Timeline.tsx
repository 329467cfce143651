// Roles as lanes over time, weight versions as vertical lines, and how long each lane waited.

import { useApi, withQuery } from "../api/client";
import type { Timeline as Data } from "../api/types";
import { number, percent, seconds } from "../format";
import { named, t } from "../i18n";
import { go, links, route, setQuery } from "../route";
import { Lanes, spanNames } from "../timeline/Lanes";
import { Section } from "../ui/Copy";
import { fills } from "../ui/fills";
import { JsonLink } from "../ui/LongText";
import { Empty, Loaded } from "../ui/State";
import { useRun } from "./Run";

function StepField({ name, label, otherwise }: { name: string; label: string; otherwise: number | null }) {
  return (
    <div class="field">
      <label for={`timeline-${name}`}>{label}</label>
      <input
        id={`timeline-${name}`}
        type="number"
        placeholder={otherwise === null ? "" : String(otherwise)}
        value={route.value.query.get(name) ?? ""}
        onChange={(event) => setQuery({ [name]: event.currentTarget.value })}
      />
    </div>
  );
}

function Idle({ data }: { data: Data }) {
  return (
    <Section title={t("timeline.idle")}>
      <div class="card flush wide" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th>{t("timeline.lane")}</th>
              <th class="num">{t("timeline.idleshare")}</th>
              <th class="num">{t("word.time")}</th>
              <th>
                <span class="hidden">{t("timeline.idleshare")}</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {data.idle.map((one) => (
              <tr>
                <td>{one.lane}</td>
                <td class="num">{percent(one.share)}</td>
                <td class="num">{seconds(one.seconds)}</td>
                <td class="bar-cell">
                  <span class="progress-track wide-track" aria-hidden="true">
                    <span style={{ width: `${Math.min(1, one.share) * 100}%` }} />
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

export function Timeline() {
  const { run, steps } = useRun();
  const query = route.value.query;
  const path = withQuery(`/runs/${encodeURIComponent(run.id)}/timeline`, { start: query.get("start"), end: query.get("end") });
  const answer = useApi<Data>(path, steps);
  return (
    <Loaded answer={answer}>
      {(data) => {
        const names = spanNames(data);
        const fill = fills(names);
        return (
        <div class="stack">
          <div class="row ends">
            <StepField name="start" label={t("rollouts.start")} otherwise={data.steps?.[0] ?? null} />
            <StepField name="end" label={t("rollouts.end")} otherwise={data.steps?.[1] ?? null} />
            {data.known_steps ? (
              <button onClick={() => setQuery({ start: data.known_steps![0], end: data.known_steps![1] })}>
                {t("timeline.all", { first: number(data.known_steps[0]), last: number(data.known_steps[1]) })}
              </button>
            ) : null}
            <JsonLink path={path} />
          </div>
          {data.lanes.every((lane) => lane.spans.length === 0) ? (
            <Empty title={t("timeline.empty")}>{data.problem}</Empty>
          ) : (
            <>
              <div class="card">
                <Lanes data={data} onStep={(step) => go(links.step(run.id, step))} />
                <ul class="legend-list">
                  {names.map((name, i) => (
                    <li>
                      <i class={`fill${fill[i]}`} aria-hidden="true" /> {named("phase", name)}
                    </li>
                  ))}
                  {data.versions.length ? (
                    <li>
                      <i class="dash" aria-hidden="true" /> {t("timeline.versions", { count: number(data.versions.length) })}
                    </li>
                  ) : null}
                </ul>
              </div>
              {data.idle.length ? <Idle data={data} /> : null}
            </>
          )}
        </div>
        );
      }}
    </Loaded>
  );
}
