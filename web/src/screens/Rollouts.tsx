// The rollouts of a run: filters in the address, a table that holds any number of them.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, get, withQuery } from "../api/client";
import type { RolloutPage, RolloutRow } from "../api/types";
import { ending, groupName, number, signed, visible } from "../format";
import { named, t, type Key } from "../i18n";
import { links, route, setQuery } from "../route";
import { JsonLink } from "../ui/LongText";
import { Empty, Failure, Loading, Notice } from "../ui/State";
import { VirtualTable } from "../ui/VirtualTable";
import { useRun } from "./Run";

const FILTERS = ["split", "start", "end", "reward_min", "reward_max", "stop", "fault", "tool", "group", "text"] as const;
const SORTS = ["step", "reward", "length", "advantage"] as const;
const ROW_HEIGHT = 39;
const PAGE = 200;
/** A search shows what it has found so far and goes on until it has this many rows. */
const ENOUGH = 60;
const INDEXING_MS = 2000;

type Choices = RolloutPage["choices"];
const NO_CHOICES: Choices = { stop: [], fault: [], tool: [], data_source: [] };

interface Found {
  rows: RolloutRow[];
  cursor: string | null;
  scanned: number;
  total: number;
  totalRows: number | null;
  choices: Choices;
  damaged: Record<string, string>;
  /** Steps that the index has, of all; what is not in it yet is in no answer by column. */
  indexed: number;
  known: number;
}

/** Pages of rollouts that belong to one filter; a new filter drops what is on its way. */
function useRollouts(path: string, version: number) {
  const [found, setFound] = useState<Found | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(true);
  const abort = useRef(new AbortController());
  const load = useCallback(
    async (cursor: string | null, old: RolloutRow[], wanted: number) => {
      const { signal } = abort.current;
      setBusy(true);
      try {
        let next = cursor;
        let rows = old;
        do {
          const url = `${path}${path.includes("?") ? "&" : "?"}limit=${PAGE}${next ? `&cursor=${encodeURIComponent(next)}` : ""}`;
          const page = await get<RolloutPage>(url, signal);
          rows = [...rows, ...page.rows];
          next = page.cursor;
          setFound({
            rows,
            cursor: next,
            scanned: page.scanned_steps,
            total: page.total_steps,
            totalRows: page.total_rows,
            choices: page.choices ?? NO_CHOICES,
            damaged: page.damaged ?? {},
            indexed: page.indexed_steps,
            known: page.known_steps,
          });
        } while (next && rows.length < wanted);
        setError(null);
      } catch (problem) {
        if (signal.aborted) return;
        if (problem instanceof ApiError) setError(problem);
        else throw problem;
      }
      if (!signal.aborted) setBusy(false);
    },
    [path],
  );
  useEffect(() => {
    abort.current = new AbortController();
    setFound(null);
    void load(null, [], ENOUGH);
    return () => abort.current.abort();
  }, [load]);
  useEffect(() => {
    // new rollouts of a live run: only where a person looks at the beginning, and rereads one page
    if (version && found && found.rows.length <= PAGE && !busy) void load(null, [], ENOUGH);
  }, [version]);
  const isIndexing = found !== null && found.indexed < found.known;
  useEffect(() => {
    // the index is built in the background: what it has by now is asked for again
    if (!isIndexing || busy || found.rows.length > PAGE) return;
    const timer = window.setTimeout(() => void load(null, [], ENOUGH), INDEXING_MS);
    return () => window.clearTimeout(timer);
  }, [isIndexing, busy, found, load]);
  const more = () => {
    if (found?.cursor && !busy) void load(found.cursor, found.rows, found.rows.length + PAGE);
  };
  return { found, error, busy, more, retry: () => void load(null, [], ENOUGH) };
}

function Field(props: { name: string; label: Key; type?: "number" | "search" | "text"; step?: string; wide?: boolean }) {
  const id = `filter-${props.name}`;
  const value = route.value.query.get(props.name) ?? "";
  const [draft, setDraft] = useState(value);
  const waiting = useRef(0);
  useEffect(() => setDraft(value), [value]);
  const change = (text: string) => {
    setDraft(text);
    window.clearTimeout(waiting.current);
    waiting.current = window.setTimeout(() => setQuery({ [props.name]: text }), 250);
  };
  return (
    <div class={props.wide ? "field wide-field" : "field"}>
      <label for={id}>{t(props.label)}</label>
      <input
        id={id}
        data-search={props.name === "text" ? true : undefined}
        type={(props.type ?? "number") as "number"}
        step={props.step}
        value={draft}
        onInput={(event) => change(event.currentTarget.value)}
      />
    </div>
  );
}

function Choice(props: { name: string; label: Key; options: [string, string][]; any?: Key; otherwise?: string }) {
  const id = `filter-${props.name}`;
  const value = route.value.query.get(props.name) ?? props.otherwise ?? "";
  const known = props.options.some(([option]) => option === value);
  return (
    <div class="field">
      <label for={id}>{t(props.label)}</label>
      <select id={id} value={value} onChange={(event) => setQuery({ [props.name]: event.currentTarget.value })}>
        {props.any ? <option value="">{t(props.any)}</option> : null}
        {value && !known ? <option value={value}>{value}</option> : null}
        {props.options.map(([option, label]) => (
          <option value={option}>{label}</option>
        ))}
      </select>
    </div>
  );
}

function same(words: string[]): [string, string][] {
  return words.map((word) => [word, word]);
}

function Filters({ choices }: { choices: Choices }) {
  const set = FILTERS.filter((name) => route.value.query.get(name)).length;
  const [wide] = useState(() => window.matchMedia("(min-width: 760px)").matches);
  return (
    <details class="card filters" open={wide}>
      <summary>
        {t("rollouts.filters")} {set ? <span class="tag live">{set}</span> : null}
      </summary>
      <div class="filter-grid">
        <Field name="text" label="rollouts.text" type="search" wide />
        <Choice
          name="split"
          label="rollouts.split"
          options={[
            ["train", t("split.train")],
            ["validation", t("split.validation")],
          ]}
          otherwise="train"
        />
        <Field name="start" label="rollouts.start" />
        <Field name="end" label="rollouts.end" />
        <Field name="reward_min" label="rollouts.rewardmin" step="any" />
        <Field name="reward_max" label="rollouts.rewardmax" step="any" />
        <Choice name="stop" label="word.stop" options={choices.stop.map((word) => [word, named("stop", word)])} any="filter.any" />
        <Choice
          name="fault"
          label="word.fault"
          options={[["any", t("filter.fault")], ...same(choices.fault)]}
          any="filter.any"
        />
        <Choice name="tool" label="word.tool" options={same(choices.tool)} any="filter.any" />
        <Field name="group" label="word.group" type="text" />
        <Choice name="sort" label="filter.sort" options={SORTS.map((sort) => [sort, named("sort", sort)])} any="filter.default" />
        <Choice
          name="order"
          label="filter.order"
          options={[
            ["asc", t("order.asc")],
            ["desc", t("order.desc")],
          ]}
          any="filter.default"
        />
        {set ? (
          <button onClick={() => setQuery(Object.fromEntries(FILTERS.map((name) => [name, null])))}>
            {t("rollouts.clear")}
          </button>
        ) : null}
      </div>
    </details>
  );
}

export function Advantage({ value }: { value: number | null }) {
  const tone = value === null || value === 0 ? "dim" : value > 0 ? "good-text" : "bad-text";
  return <span class={tone}>{signed(value)}</span>;
}

function Row({ run, row }: { run: string; row: RolloutRow }) {
  const href = links.rollout(run, row.split, row.step, row.index);
  return (
    <tr data-row class="rollout-row" onClick={(event) => open(event, href)}>
      <td class="num">
        <a href={href}>
          {number(row.step)}
          <span class="dim">·{row.index}</span>
        </a>
      </td>
      <td class="num">{number(row.reward)}</td>
      <td class="num">
        <Advantage value={row.advantage} />
      </td>
      <td class="num narrow-off">{number(row.tokens)}</td>
      <td class="narrow-off">
        {row.fault ? <span class="tag bad" title={row.fault}>{row.fault}</span> : <span class="dim">{row.stop ? named("stop", row.stop) : "–"}</span>}
      </td>
      <td class="narrow-off dim clip">{row.tools.join(", ")}</td>
      <td class="narrow-off">
        {row.group ? <a href={links.group(run, row.split, row.step, row.group)}>{groupName(row.group)}</a> : "–"}
      </td>
      <td class="preview narrow-off">
        <span class="dim">{visible(ending(row.prompt.trimEnd()))}</span>
      </td>
      <td class="preview">{visible(row.answer)}</td>
    </tr>
  );
}

function open(event: MouseEvent, href: string): void {
  if ((event.target as HTMLElement).closest("a")) return;
  window.location.hash = href;
}

function Head() {
  return (
    <thead>
      <tr>
        <th class="num">{t("rollouts.step")}</th>
        <th class="num">{t("word.reward")}</th>
        <th class="num">{t("word.advantage")}</th>
        <th class="num narrow-off">{t("word.tokens")}</th>
        <th class="narrow-off">{t("word.stop")}</th>
        <th class="narrow-off">{t("word.tools")}</th>
        <th class="narrow-off">{t("word.group")}</th>
        <th class="narrow-off">{t("word.prompt")}</th>
        <th>{t("word.answer")}</th>
      </tr>
    </thead>
  );
}

function Count({ found, busy }: { found: Found; busy: boolean }) {
  const searching = found.totalRows === null && found.cursor !== null && found.total > 0;
  return (
    <p class="dim small" role="status">
      {found.totalRows !== null
        ? t("rollouts.count", { shown: number(found.rows.length), all: number(found.totalRows) })
        : t("rollouts.found", { shown: number(found.rows.length) })}
      {searching ? ` · ${t("rollouts.scanned", { done: number(found.scanned), all: number(found.total) })}` : ""}
      {found.indexed < found.known
        ? ` · ${t("rollouts.indexed", { done: number(found.indexed), all: number(found.known) })}`
        : busy
          ? ` · ${t("rollouts.searching")}`
          : ""}
    </p>
  );
}

export function Rollouts() {
  const { run, rollouts } = useRun();
  const query = route.value.query;
  const values = Object.fromEntries([...FILTERS, "sort", "order"].map((name) => [name, query.get(name)]));
  const path = withQuery(`/runs/${encodeURIComponent(run.id)}/rollouts`, values);
  const { found, error, busy, more, retry } = useRollouts(path, rollouts);
  const [choices, setChoices] = useState<Choices>(NO_CHOICES);
  useEffect(() => {
    if (found) setChoices(found.choices);
  }, [found]);
  return (
    <div class="stack">
      <Filters choices={choices} />
      {error ? <Failure error={error} retry={retry} /> : null}
      {found && Object.keys(found.damaged).length ? (
        <Notice level="bad">
          <strong>{t("rollouts.damaged")}</strong>
          {Object.entries(found.damaged).map(([step, why]) => (
            <span class="small text">
              {t("word.stepn", { step })}: {why}
            </span>
          ))}
        </Notice>
      ) : null}
      {found === null ? (
        error ? null : (
          <Loading />
        )
      ) : found.rows.length === 0 && found.indexed < found.known ? (
        <>
          <Count found={found} busy={busy} />
          <Loading />
        </>
      ) : found.rows.length === 0 && !busy ? (
        <Empty title={t("rollouts.empty")}>
          <p>{t("rollouts.empty.how")}</p>
        </Empty>
      ) : (
        <>
          <div class="row between">
            <Count found={found} busy={busy} />
            <span class="row">
              <a class="button" href={links.rollouts(run.id, { sort: "reward", order: "desc" })}>
                {t("rollouts.best")}
              </a>
              <a class="button" href={links.rollouts(run.id, { sort: "reward", order: "asc" })}>
                {t("rollouts.worst")}
              </a>
              <JsonLink path={path} />
            </span>
          </div>
          <div class="card flush">
            <VirtualTable
              rows={found.rows}
              rowHeight={ROW_HEIGHT}
              columns={9}
              label={t("tab.rollouts")}
              head={<Head />}
              row={(row) => <Row key={`${row.split}/${row.step}/${row.index}`} run={run.id} row={row} />}
              more={more}
            />
          </div>
        </>
      )}
    </div>
  );
}
