// All runs of the folder: state, step, last validation, sparkline; two or more can be compared.

import { useEffect, useMemo, useState } from "preact/hooks";
import { useApi, useEvents } from "../api/client";
import type { RunRow } from "../api/types";
import { ago, epoch, number, signed, when } from "../format";
import { t, type Key } from "../i18n";
import { go, link, links, route, setQuery } from "../route";
import { acting, serves, session } from "../session";
import { Icon } from "../ui/Icon";
import { Progress, RunState } from "../ui/RunState";
import { Sparkline } from "../ui/Sparkline";
import { Empty, Loaded } from "../ui/State";

type Sort = "updated" | "name" | "state" | "reward";

const ORDER: Record<Sort, (a: RunRow, b: RunRow) => number> = {
  updated: (a, b) => (epoch(b.updated) ?? 0) - (epoch(a.updated) ?? 0),
  name: (a, b) => a.name.localeCompare(b.name),
  state: (a, b) => a.state.localeCompare(b.state),
  reward: (a, b) => (b.reward_last ?? -Infinity) - (a.reward_last ?? -Infinity),
};

function matches(run: RunRow, text: string): boolean {
  const words = [run.name, run.path, run.project, run.stage, run.algorithm, run.model, run.state];
  const whole = words.filter(Boolean).join(" ").toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => whole.includes(word));
}

function Validation({ run }: { run: RunRow }) {
  if (run.validation === null) return <span class="dim">–</span>;
  const { name, first, last } = run.validation;
  const change = first !== null && last !== null ? last - first : null;
  return (
    <a href={links.rollouts(run.id, { split: "validation" })} title={name}>
      {number(last)}
      {change !== null ? <span class="dim"> ({signed(change)})</span> : null}
    </a>
  );
}

function Row(props: { run: RunRow; chosen: boolean; choose: (on: boolean) => void }) {
  const { run } = props;
  return (
    <tr data-row class={props.chosen ? "chosen" : ""}>
      <td>
        <input
          type="checkbox"
          checked={props.chosen}
          disabled={run.state === "damaged"}
          aria-label={t("runs.choose", { name: run.name })}
          onChange={(event) => props.choose(event.currentTarget.checked)}
        />
      </td>
      <td class="run-name">
        <a href={links.run(run.id)}>
          <strong>{run.name}</strong>
        </a>
        <div class="dim small">{[run.project, run.stage, run.algorithm, run.model].filter(Boolean).join(" · ")}</div>
        {run.problem ? <div class="bad-text small text">{run.problem}</div> : null}
      </td>
      <td>
        <RunState state={run.state} />
      </td>
      <td data-label={t("word.step")}>
        <Progress step={run.step} total={run.total_steps} />
      </td>
      <td data-label={t("word.reward")} class="num">
        {run.step !== null && run.reward_last !== null ? <a href={links.step(run.id, run.step)}>{number(run.reward_last)}</a> : "–"}
      </td>
      <td class="spark-cell">
        <Sparkline values={run.sparkline} />
      </td>
      <td data-label={t("word.validation")} class="num">
        <Validation run={run} />
      </td>
      <td data-label={t("word.updated")} class="dim" title={when(run.updated)}>
        {ago(run.updated)}
      </td>
    </tr>
  );
}

const COLUMNS: { label: Key; sort?: Sort; num?: boolean }[] = [
  { label: "word.run", sort: "name" },
  { label: "word.state", sort: "state" },
  { label: "word.step" },
  { label: "word.reward", sort: "reward", num: true },
  { label: "runs.curve" },
  { label: "word.validation", num: true },
  { label: "word.updated", sort: "updated" },
];

function Head({ sort }: { sort: Sort }) {
  return (
    <thead>
      <tr>
        <th>
          <span class="hidden">{t("runs.compare")}</span>
        </th>
        {COLUMNS.map((column) => (
          <th class={column.num ? "num" : ""} aria-sort={column.sort === sort ? "descending" : undefined}>
            {column.sort ? (
              <button class="plain head" onClick={() => setQuery({ sort: column.sort })}>
                {t(column.label)}
                {column.sort === sort ? " ↓" : ""}
              </button>
            ) : (
              t(column.label)
            )}
          </th>
        ))}
      </tr>
    </thead>
  );
}

function NoRuns() {
  return (
    <Empty title={t("runs.empty", { folder: session.value?.folder ?? "" })}>
      <p>{t("runs.empty.how")}</p>
      <p>
        <code>luyen train</code>
      </p>
      {acting.value ? (
        <p>
          <a href="#/new">{t("nav.new")}</a>
        </p>
      ) : null}
    </Empty>
  );
}

export function Runs() {
  const answer = useApi<{ runs: RunRow[]; is_whole?: boolean }>("/runs");
  const [changed, setChanged] = useState<Map<string, RunRow>>(new Map());
  const [chosen, setChosen] = useState<string[]>([]);
  useEvents(
    serves("/events") ? "/events" : null,
    { runs: (data) => setChanged((old) => new Map(old).set((data as RunRow).id, data as RunRow)) },
    answer.reload,
  );
  useEffect(() => {
    // the first answer of a large folder comes before all of it was read
    if (answer.data?.is_whole !== false) return;
    const waiting = window.setTimeout(answer.reload, 700);
    return () => window.clearTimeout(waiting);
  }, [answer.data]);
  const query = route.value.query;
  const text = query.get("text") ?? "";
  const sort = (query.get("sort") as Sort | null) ?? "updated";
  const all = useMemo(() => {
    const rows = new Map((answer.data?.runs ?? []).map((run) => [run.id, run]));
    changed.forEach((run, id) => (run.removed ? rows.delete(id) : rows.set(id, run)));
    return [...rows.values()];
  }, [answer.data, changed]);
  const rows = useMemo(
    () => all.filter((run) => matches(run, text)).sort(ORDER[sort] ?? ORDER.updated),
    [all, text, sort],
  );
  const kept = chosen.filter((id) => all.some((run) => run.id === id));
  const choose = (id: string, on: boolean) =>
    setChosen((old) => (on ? [...old, id] : old.filter((one) => one !== id)));
  return (
    <div class="stack">
      <div class="row between">
        <div>
          <h1>{t("nav.runs")}</h1>
          <code class="dim">{session.value?.folder}</code>
        </div>
        <div class="row toolbar">
          <div class="search">
            <Icon name="search" />
            <input
              data-search
              type="search"
              aria-label={t("runs.search")}
              placeholder={t("runs.search")}
              value={text}
              onInput={(event) => setQuery({ text: event.currentTarget.value })}
            />
          </div>
          {serves("/compare") ? (
            <button class="primary" disabled={kept.length < 2} onClick={() => go(link(["compare"], { id: kept }))}>
              {t("runs.compare")} {kept.length ? `(${kept.length})` : ""}
            </button>
          ) : null}
        </div>
      </div>
      <Loaded answer={answer}>
        {() =>
          all.length === 0 ? (
            <NoRuns />
          ) : rows.length === 0 ? (
            <Empty title={t("runs.nomatch")} />
          ) : (
            <div class="card flush wide" tabIndex={0}>
              <table class="runs">
                <Head sort={sort} />
                <tbody>
                  {rows.map((run) => (
                    <Row key={run.id} run={run} chosen={chosen.includes(run.id)} choose={(on) => choose(run.id, on)} />
                  ))}
                </tbody>
              </table>
            </div>
          )
        }
      </Loaded>
      <p class="dim small">{t("runs.count", { shown: rows.length, all: all.length })}</p>
    </div>
  );
}
