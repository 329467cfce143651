// A new run: a recipe to begin with, a form over the schema, findings as one types, the plan, start.

import { useEffect, useMemo, useState } from "preact/hooks";
import { ApiError, post, useApi } from "../api/client";
import type { Check, Finding, Plan, Recipe } from "../api/types";
import { t } from "../i18n";
import { route, setQuery } from "../route";
import { acting } from "../session";
import { parse, valueAt, withValue, type Parsed } from "../form/document";
import { KeyField } from "../form/KeyField";
import { keysOf, search, type ConfigKey, type SchemaNode } from "../form/schema";
import { Command, CopyButton, Section } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { Memory } from "../ui/Memory";
import { Findings } from "../ui/RunState";
import { Failure, Loaded, Loading, Notice } from "../ui/State";
import { useJob } from "./Export";

/** The keys that most people set, shown before any search. */
const COMMON = [
  "data.train_files",
  "data.val_files",
  "data.train_batch_size",
  "data.max_prompt_length",
  "data.max_response_length",
  "actor_rollout_ref.model.path",
  "actor_rollout_ref.actor.optim.lr",
  "actor_rollout_ref.rollout.n",
  "actor_rollout_ref.rollout.temperature",
  "algorithm.adv_estimator",
  "trainer.total_training_steps",
  "trainer.test_freq",
  "trainer.save_freq",
  "trainer.experiment_name",
];
const MANY = 80;
const DRAFT = "luyen.draft";

/** A reload of the page finds what was typed. */
function useDraft(): [string, (text: string) => void] {
  const [text, setText] = useState(() => window.sessionStorage.getItem(DRAFT) ?? "");
  const change = (next: string) => {
    setText(next);
    window.sessionStorage.setItem(DRAFT, next);
  };
  return [text, change];
}

function useCheck(yaml: string) {
  const [check, setCheck] = useState<Check | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    if (yaml.trim() === "") {
      setCheck(null);
      setError(null);
      return;
    }
    const abort = new AbortController();
    const waiting = window.setTimeout(() => {
      setBusy(true);
      post<Check>("/check", { yaml, overrides: [] }, abort.signal).then(
        (answer) => {
          setCheck(answer);
          setError(null);
          setBusy(false);
        },
        (problem: unknown) => {
          if (abort.signal.aborted) return;
          setBusy(false);
          if (problem instanceof ApiError) setError(problem);
          else throw problem;
        },
      );
    }, 350);
    return () => {
      window.clearTimeout(waiting);
      abort.abort();
    };
  }, [yaml]);
  return { check, error, busy };
}

function about(findings: Finding[], key: string): Finding[] {
  return findings.filter((finding) => finding.key === key);
}

function chosenKeys(keys: ConfigKey[], text: string, block: string, parsed: Parsed, findings: Finding[]): ConfigKey[] {
  if (text) return search(block ? keys.filter((one) => one.block === block) : keys, text);
  if (block) return keys.filter((one) => one.block === block);
  const named = new Set(findings.map((finding) => finding.key));
  return keys.filter(
    (one) => COMMON.includes(one.key) || named.has(one.key) || valueAt(parsed, one.path) !== undefined,
  );
}

interface SchemaPage {
  schema: SchemaNode;
}

interface FormProps {
  schema: SchemaNode;
  yaml: string;
  change: (yaml: string) => void;
  findings: Finding[];
  /** The resolved configuration, by which a field that is not set says what holds. */
  resolved?: Record<string, unknown>;
}

/** The key with the value that holds where the text does not set it: of a file it builds on, or the default. */
function withInherited(one: ConfigKey, resolved: Record<string, unknown> | undefined): ConfigKey {
  let value: unknown = resolved;
  for (const part of one.path) {
    if (typeof value !== "object" || value === null || !(part in value)) return one;
    value = (value as Record<string, unknown>)[part];
  }
  return { ...one, default: value };
}

function Form({ schema, yaml, change, findings, resolved }: FormProps) {
  const keys = useMemo(() => keysOf(schema), [schema]);
  const blocks = useMemo(() => [...new Set(keys.map((one) => one.block))], [keys]);
  const text = route.value.query.get("key") ?? "";
  const block = route.value.query.get("block") ?? "";
  const parsed = useMemo(() => parse(yaml), [yaml]);
  const shown = useMemo(() => chosenKeys(keys, text, block, parsed, findings), [keys, text, block, parsed, findings]);
  const [limit, setLimit] = useState(MANY);
  return (
    <Section
      title={t("form.keys")}
      aside={<span class="dim small">{t("form.count", { shown: shown.length, all: keys.length })}</span>}
    >
      <div class="row choices">
        <div class="search grow">
          <Icon name="search" />
          <input
            data-search
            type="search"
            aria-label={t("form.search")}
            placeholder={t("form.search")}
            value={text}
            onInput={(event) => setQuery({ key: event.currentTarget.value })}
          />
        </div>
        <select class="auto" aria-label={t("form.block")} value={block} onChange={(event) => setQuery({ block: event.currentTarget.value })}>
          <option value="">{t("form.common")}</option>
          {blocks.map((one) => (
            <option value={one}>{one}</option>
          ))}
        </select>
      </div>
      {parsed.problem ? <Notice level="bad">{parsed.problem}</Notice> : null}
      <div class="card key-fields">
        {shown.slice(0, limit).map((one) => (
          <KeyField
            key={one.key}
            one={withInherited(one, resolved)}
            value={valueAt(parsed, one.path)}
            findings={about(findings, one.key)}
            change={(value) => change(withValue(yaml, one.path, value))}
          />
        ))}
        {shown.length === 0 ? <p class="dim">{t("plan.nokey")}</p> : null}
        {shown.length > limit ? <button onClick={() => setLimit(limit + MANY)}>{t("form.more")}</button> : null}
      </div>
    </Section>
  );
}

function Recipes({ take }: { take: (yaml: string) => void }) {
  const answer = useApi<Recipe[] | { recipes: Recipe[] }>("/recipes");
  return (
    <Loaded answer={answer}>
      {(data) => {
        const recipes = Array.isArray(data) ? data : data.recipes;
        return (
          <div class="field">
            <label for="recipe">{t("form.recipe")}</label>
            <select
              id="recipe"
              value=""
              onChange={(event) => {
                const found = recipes.find((one) => one.name === event.currentTarget.value);
                if (found) take(found.yaml);
              }}
            >
              <option value="">{t("form.recipe.choose")}</option>
              {recipes.map((one) => (
                <option value={one.name}>{one.title ? `${one.name}: ${one.title}` : one.name}</option>
              ))}
            </select>
          </div>
        );
      }}
    </Loaded>
  );
}

function Start({ yaml, check }: { yaml: string; check: Check | null }) {
  const [name, setName] = useState("");
  const { error, busy, start } = useJob();
  if (!acting.value) return <Notice>{t("form.readonly")}</Notice>;
  const send = (event: Event) => {
    event.preventDefault();
    void start("/jobs", { yaml, name, overrides: [] });
  };
  return (
    <form class="stack tight" onSubmit={send}>
      <div class="row">
        <div class="field grow">
          <label for="job-name">{t("form.name")}</label>
          <input id="job-name" value={name} onInput={(event) => setName(event.currentTarget.value)} />
        </div>
        <button class="primary start" disabled={busy || !check?.ok}>
          <Icon name="play" /> {t("form.start")}
        </button>
      </div>
      {error ? <Failure error={error} /> : null}
    </form>
  );
}

function Outcome({ yaml, check, busy, error }: { yaml: string; check: Check | null; busy: boolean; error: ApiError | null }) {
  const errors = check?.findings.filter((finding) => finding.level === "error").length ?? 0;
  return (
    <div class="stack outcome">
      <Section title={t("form.check")} aside={busy ? <span class="dim small">{t("form.checking")}</span> : null}>
        <div class="card stack tight">
          {error ? <Failure error={error} /> : null}
          {check === null ? (
            <p class="dim">{t("form.begin")}</p>
          ) : (
            <>
              <p class={check.ok ? "good-text" : "bad-text"}>
                <strong>{check.ok ? t("form.ok") : t("form.errors", { count: errors })}</strong>
              </p>
              {check.findings.length ? <Findings findings={check.findings} /> : null}
            </>
          )}
          <Start yaml={yaml} check={check} />
        </div>
      </Section>
      {check?.plan ? (
        <Section title={t("tab.plan")}>
          <div class="card stack">
            <pre class="small">{check.plan.lines.join("\n")}</pre>
            {check.plan.memory?.length ? <Memory bars={check.plan.memory} /> : null}
          </div>
        </Section>
      ) : null}
      {check?.command ? (
        <Section title={t("form.command")}>
          <Command text={check.command} />
        </Section>
      ) : null}
      {check?.yaml ? (
        <details class="card">
          <summary>{t("form.resolved")}</summary>
          <pre class="padded">{check.yaml}</pre>
        </details>
      ) : null}
    </div>
  );
}

export function NewRun() {
  const [yaml, setYaml] = useDraft();
  const schema = useApi<SchemaPage>("/schema");
  const from = route.value.query.get("run");
  const copied = useApi<Plan>(from ? `/runs/${encodeURIComponent(from)}/plan` : null);
  useEffect(() => {
    if (copied.data) {
      setYaml(copied.data.yaml);
      setQuery({ run: null });
    }
  }, [copied.data]);
  const { check, error, busy } = useCheck(yaml);
  return (
    <div class="stack">
      <h1>{t("nav.new")}</h1>
      {from ? <Loading /> : null}
      <div class="columns new-run">
        <div class="stack">
          <div class="card stack tight">
            <Recipes take={setYaml} />
            <details open={yaml !== ""}>
              <summary>YAML</summary>
              <div class="stack tight padded">
                <textarea
                  aria-label="YAML"
                  rows={14}
                  spellcheck={false}
                  value={yaml}
                  onInput={(event) => setYaml(event.currentTarget.value)}
                />
                <div class="row">
                  <CopyButton text={yaml} label={t("action.copy")} />
                  <button onClick={() => setYaml("")}>{t("form.clear")}</button>
                </div>
              </div>
            </details>
          </div>
          <Loaded answer={schema}>
            {(data) => <Form schema={data.schema} yaml={yaml} change={setYaml} findings={check?.findings ?? []} resolved={check?.config} />}
          </Loaded>
        </div>
        <Outcome yaml={yaml} check={check} busy={busy} error={error} />
      </div>
    </div>
  );
}
