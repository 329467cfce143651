// Two or more runs: curves on one axis, keys that differ, and the step where they part.

import { useEffect, useMemo, useState } from "preact/hooks";
import { ApiError, get, useApi, withQuery } from "../api/client";
import type { Compare as Data, SeriesAnswer } from "../api/types";
import { number, plain } from "../format";
import { t } from "../i18n";
import { go, links, route, setQuery } from "../route";
import { Chart, type Curve } from "../ui/Chart";
import { Section } from "../ui/Copy";
import { JsonLink } from "../ui/LongText";
import { Progress, RunState } from "../ui/RunState";
import { Empty, Failure, Loaded, Loading, Notice } from "../ui/State";

const FIRST = ["reward/mean", "val/accuracy", "actor/entropy", "response_length/mean", "actor/ref_kl", "actor/grad_norm"];
const MOST_FIRST = 6;
const PAUSE_MS = 2000;

/** Some curves to begin with: known names first, then those whose name says reward or loss. */
function beginning(names: string[]): string[] {
  const known = FIRST.filter((name) => names.includes(name));
  const likely = names.filter((name) => /reward|score|loss|entropy|kl|length|grad_norm/.test(name) && !known.includes(name));
  return [...known, ...likely].slice(0, MOST_FIRST);
}

function useCurves(data: Data, names: string[]) {
  const [curves, setCurves] = useState<Record<string, Curve[]> | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [asks, setAsks] = useState(0);
  const key = [...data.runs.map((run) => run.id), ...names].join("|");
  useEffect(() => {
    const abort = new AbortController();
    let later = 0;
    const asked = data.runs.map((run) =>
      get<SeriesAnswer>(withQuery(`/runs/${encodeURIComponent(run.id)}/series`, { name: names, points: 800 }), abort.signal),
    );
    Promise.all(asked).then(
      (answers) => {
        const found: Record<string, Curve[]> = {};
        for (const name of names) {
          found[name] = data.runs.map((run, i) => ({
            label: run.name,
            colour: i,
            series: { ...(answers[i]!.series[name] ?? { step: [], value: [] }), low: undefined, high: undefined },
          }));
        }
        setCurves(found);
        setError(null);
        // of a large file the first part is shown while the rest is read
        if (answers.some((one) => one.is_whole === false)) later = window.setTimeout(() => setAsks((count) => count + 1), PAUSE_MS);
      },
      (problem: unknown) => {
        if (abort.signal.aborted) return;
        if (problem instanceof ApiError) setError(problem);
        else throw problem;
      },
    );
    return () => {
      abort.abort();
      window.clearTimeout(later);
    };
  }, [key, asks]);
  return { curves, error };
}

function Curves({ data }: { data: Data }) {
  const chosen = route.value.query.get("metrics")?.split(",").filter(Boolean);
  const names = useMemo(() => chosen ?? beginning(data.names), [data, chosen?.join()]);
  const { curves, error } = useCurves(data, names);
  if (data.names.length === 0) return <Empty title={t("compare.nometric")} />;
  const drop = (name: string) => setQuery({ metrics: names.filter((one) => one !== name).join(",") || "-" });
  return (
    <Section
      title={t("overview.curves")}
      aside={
        <select
          class="auto"
          aria-label={t("compare.add")}
          value=""
          onChange={(event) => setQuery({ metrics: [...names.filter((one) => one !== "-"), event.currentTarget.value].join(",") })}
        >
          <option value="">{t("compare.add")}</option>
          {data.names
            .filter((name) => !names.includes(name))
            .map((name) => (
              <option value={name}>{name}</option>
            ))}
        </select>
      }
    >
      {error ? <Failure error={error} /> : null}
      {curves === null ? (
        <Loading />
      ) : (
        <div class="grid two">
          {names
            .filter((name) => curves[name])
            .map((name) => (
              <div class="card chart-card" key={name}>
                <div class="row between">
                  <h3>
                    <code>{name}</code>
                  </h3>
                  <button class="plain" onClick={() => drop(name)} aria-label={t("compare.drop", { name })}>
                    ×
                  </button>
                </div>
                <Chart title={name} curves={curves[name]!} height={220} sync="compare" onStep={(step) => go(links.step(data.runs[0]!.id, step))} />
              </div>
            ))}
        </div>
      )}
    </Section>
  );
}

function Divergence({ data }: { data: Data }) {
  if (data.divergence === null) return <Notice level="info">{t("compare.nodigest")}</Notice>;
  const { step, stage, equal_steps: equal, message } = data.divergence;
  const isEqual = step === null && equal !== null && equal > 0;
  const none = step === null ? t("compare.nodigest") : t("compare.diverges", { step: number(step), stage: stage ?? "" });
  return (
    <Notice level={isEqual ? "good" : "info"}>
      <strong>{isEqual ? t("compare.equal") : none}</strong>
      {isEqual ? null : <span>{message}</span>}
      {equal !== null && equal > 0 ? <span class="dim small">{t("compare.equalsteps", { count: number(equal) })}</span> : null}
      {step !== null ? (
        <span class="row small">
          {data.runs.map((run) => (
            <a href={links.step(run.id, step)}>{`${run.name}: ${t("word.stepn", { step: number(step) })}`}</a>
          ))}
        </span>
      ) : null}
    </Notice>
  );
}

function Difference({ data }: { data: Data }) {
  return (
    <Section title={t("compare.config")}>
      {data.config.length === 0 ? (
        <p class="dim">{t("compare.same")}</p>
      ) : (
        <div class="card flush wide" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th>{t("plan.key")}</th>
                {data.runs.map((run) => (
                  <th>{run.name}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {data.config.map((one) => (
                <tr data-row>
                  <td>
                    <code>{one.key}</code>
                  </td>
                  {data.runs.map((run) => (
                    <td>
                      <code class="text">{run.id in one.values ? plain(one.values[run.id]) : "–"}</code>
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Section>
  );
}

export function Compare() {
  const ids = route.value.query.getAll("id");
  const path = ids.length >= 2 ? withQuery("/compare", { id: ids }) : null;
  const answer = useApi<Data>(path);
  if (path === null) {
    return (
      <Empty title={t("compare.choose")}>
        <a href="#/runs">{t("nav.runs")}</a>
      </Empty>
    );
  }
  return (
    <div class="stack">
      <div class="row between">
        <h1>{t("compare.title")}</h1>
        <JsonLink path={path} />
      </div>
      <Loaded answer={answer}>
        {(data) => (
          <div class="stack">
            <ul class="compared">
              {data.runs.map((run, i) => (
                <li class="card">
                  <i class={`fill${i % 8}`} aria-hidden="true" />
                  <a href={links.run(run.id)}>
                    <strong>{run.name}</strong>
                  </a>
                  <RunState state={run.state} />
                  <Progress step={run.step} total={run.total_steps} />
                  <code class="dim">{run.path}</code>
                </li>
              ))}
            </ul>
            <Divergence data={data} />
            <Curves data={data} />
            <Difference data={data} />
          </div>
        )}
      </Loaded>
    </div>
  );
}
