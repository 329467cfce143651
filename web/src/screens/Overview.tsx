// How the run goes: a verdict and why, the headline curves, where the time went.

import { useEffect, useMemo, useState } from "preact/hooks";
import { useApi, withQuery } from "../api/client";
import type { Headline, MetricNames, Overview as Data, Series, SeriesAnswer } from "../api/types";
import { number, percent, plain, seconds, when } from "../format";
import { named, t } from "../i18n";
import { told } from "../i18n/told";
import { go, links } from "../route";
import { serves } from "../session";
import { Chart, lastOf } from "../ui/Chart";
import { Command, Section } from "../ui/Copy";
import { fills } from "../ui/fills";
import { Icon } from "../ui/Icon";
import { Findings } from "../ui/RunState";
import { Empty, Loaded, Notice } from "../ui/State";
import { useRun } from "./Run";

const TONE = { healthy: "good", degraded: "warn", collapsed: "bad", unknown: "info" } as const;

function Verdict({ run }: { run: Data }) {
  const { level, sentence } = run.verdict;
  const tone = TONE[level] ?? "info";
  // The sentence ends with the message of the worst finding; other languages have the title of its rule.
  const title = run.findings.find((one) => sentence.endsWith(one.message))?.title ?? "";
  const short = told(title);
  return (
    <div class={`verdict ${tone}`} aria-busy={run.pending === true}>
      <Icon name={tone === "good" ? "check" : tone === "info" ? "info" : "warning"} />
      <p>
        <strong>{named("verdict", level)}.</strong> {run.pending ? t("verdict.pending") : level === "healthy" ? t("verdict.nothing") : short !== title ? short : told(sentence)}
      </p>
    </div>
  );
}

const PAUSE_MS = 2000;

interface Zoom {
  start: number;
  end: number;
}

/** Curves of metrics by name, asked again in more detail where a person zoomed in. */
export function useSeries(id: string, names: string[], zoom: Zoom | null, steps: number) {
  const path = names.length
    ? withQuery(`/runs/${encodeURIComponent(id)}/series`, {
        name: names,
        points: 800,
        start: zoom ? Math.floor(zoom.start) : null,
        end: zoom ? Math.ceil(zoom.end) : null,
      })
    : null;
  const answer = useApi<SeriesAnswer>(path, steps);
  useEffect(() => {
    // intervals that are still computed, or a large file of which the first part is shown
    if (!answer.data?.pending && answer.data?.is_whole !== false) return;
    const later = window.setTimeout(answer.reload, PAUSE_MS);
    return () => window.clearTimeout(later);
  }, [answer.data]);
  return answer;
}

const NOTHING: Series = { step: [], value: [] };

function HeadlineChart(props: { run: string; head: Headline; series: Series; zoom: (range: Zoom | null) => void }) {
  const { head, series } = props;
  const label = named("headline", head.key) === head.key ? head.label : named("headline", head.key);
  const curves = useMemo(() => [{ label, series }], [label, series]);
  const last = series.value.length ? lastOf(series.value) : head.last;
  return (
    <div class="card chart-card">
      <div class="row between">
        <h3 title={head.name}>{label}</h3>
        <span class="last num">
          {head.unit === "share" ? percent(last) : number(last)}
          {head.unit && head.unit !== "share" ? <span class="dim small"> {named("unit", head.unit)}</span> : null}
        </span>
      </div>
      <Chart
        title={label}
        curves={curves}
        height={160}
        share={head.unit === "share"}
        sync={props.run}
        onStep={(step) => go(links.step(props.run, step))}
        onZoom={(range) => props.zoom(range && { start: range[0], end: range[1] })}
      />
      {series.interval ? <p class="dim small">{t("chart.interval")}</p> : null}
    </div>
  );
}

function Headlines({ run, steps }: { run: Data; steps: number }) {
  const [zoom, setZoom] = useState<Zoom | null>(null);
  const names = run.headline.map((head) => head.name);
  const answer = useSeries(run.id, names, zoom, steps);
  if (names.length === 0) return <Empty title={t("overview.nocurve")} />;
  return (
    <Section
      title={t("overview.curves")}
      aside={zoom ? <button onClick={() => setZoom(null)}>{t("chart.all")}</button> : <span class="dim small">{t("chart.hint")}</span>}
    >
      <Loaded answer={answer}>
        {(data) => (
          <div class="grid">
            {run.headline.map((head) => (
              <HeadlineChart key={head.key} run={run.id} head={head} series={data.series[head.name] ?? NOTHING} zoom={setZoom} />
            ))}
          </div>
        )}
      </Loaded>
    </Section>
  );
}

function TimeSpent({ run }: { run: Data }) {
  if (run.time.length === 0) return null;
  const fill = fills(run.time.map((part) => part.phase));
  const total = run.time.reduce((sum, part) => sum + part.seconds, 0);
  return (
    <Section title={t("overview.time")} aside={<a href={links.run(run.id, "timeline")}>{t("tab.timeline")}</a>}>
      <div class="card stack tight">
        <div class="share-bar" aria-hidden="true">
          {run.time.map((part, i) => (
            <span class={`fill${fill[i]}`} style={{ width: `${part.share * 100}%` }} title={named("phase", part.phase)} />
          ))}
        </div>
        <ul class="shares">
          {run.time.map((part, i) => (
            <li>
              <i class={`fill${fill[i]}`} aria-hidden="true" />
              <span>{named("phase", part.phase)}</span>
              <span class="num">{percent(part.share)}</span>
              <span class="num dim">{seconds(part.seconds)}</span>
            </li>
          ))}
        </ul>
        <p class="dim small">{t("overview.total", { time: seconds(total) })}</p>
      </div>
    </Section>
  );
}

function AnyMetric({ run, steps }: { run: Data; steps: number }) {
  const [open, setOpen] = useState(false);
  const [text, setText] = useState("");
  const [chosen, setChosen] = useState<string[]>([]);
  const names = useApi<MetricNames>(open ? `/runs/${encodeURIComponent(run.id)}/metrics` : null);
  const series = useSeries(run.id, chosen, null, steps);
  const found = (names.data?.names ?? []).filter((one) => one.name.toLowerCase().includes(text.toLowerCase()));
  return (
    <details class="card" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{t("overview.any")}</summary>
      <div class="columns any-metric">
        <div class="stack tight">
          <input
            type="search"
            aria-label={t("overview.search")}
            placeholder={t("overview.search")}
            value={text}
            onInput={(event) => setText(event.currentTarget.value)}
          />
          <ul class="metric-list" tabIndex={0} aria-label={t("overview.any")}>
            {found.map((one) => (
              <li key={one.name}>
                <label title={one.help ?? ""}>
                  <input
                    type="checkbox"
                    checked={chosen.includes(one.name)}
                    onChange={(event) => {
                      const on = event.currentTarget.checked;
                      setChosen((old) => (on ? [...old, one.name] : old.filter((name) => name !== one.name)));
                    }}
                  />
                  <code>{one.name}</code>
                  {one.help ? <span class="dim"> {one.help}</span> : null}
                </label>
              </li>
            ))}
          </ul>
        </div>
        <div class="stack tight">
          {chosen.map((name) => (
            <Metric key={name} run={run.id} name={name} series={series.data?.series[name] ?? NOTHING} />
          ))}
        </div>
      </div>
    </details>
  );
}

function Metric({ run, name, series }: { run: string; name: string; series: Series }) {
  const curves = useMemo(() => [{ label: name, series }], [name, series]);
  return (
    <div>
      <h3>
        <code>{name}</code>
      </h3>
      <Chart title={name} curves={curves} height={150} sync={run} onStep={(step) => go(links.step(run, step))} />
    </div>
  );
}

function Facts({ run }: { run: Data }) {
  const facts = Object.entries(run.manifest).filter(([, value]) => value !== null && value !== "");
  return (
    <details class="card">
      <summary>{t("overview.facts")}</summary>
      <dl class="facts">
        <div>
          <dt>{t("word.started")}</dt>
          <dd>{when(run.started)}</dd>
        </div>
        <div>
          <dt>{t("word.updated")}</dt>
          <dd>{when(run.updated)}</dd>
        </div>
        {facts.map(([name, value]) => (
          <div>
            <dt>{name}</dt>
            <dd class="text">{plain(value)}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}

/** How a run that ended before its last step goes on. */
function GoOn({ run }: { run: Data }) {
  const command = run.commands["resume"];
  if (!command || (run.state !== "killed" && run.state !== "interrupted")) return null;
  return (
    <Notice level="info">
      <strong>{t(run.state === "killed" ? "overview.killed" : "overview.interrupted", { step: number(run.step) })}</strong>
      <span>{t("overview.goon")}</span>
      <Command text={command} />
      {serves("/runs/{}/resume") ? <a href={links.run(run.id, "export")}>{t("command.resume")}</a> : null}
    </Notice>
  );
}

export function Overview() {
  const { run, steps } = useRun();
  const commands = Object.entries(run.commands).filter((pair): pair is [string, string] => !!pair[1]);
  return (
    <div class="stack">
      <Verdict run={run} />
      <GoOn run={run} />
      {run.findings.length ? (
        <Section title={t("overview.findings")}>
          <div class="card">
            <Findings findings={run.findings} run={run.id} />
          </div>
        </Section>
      ) : null}
      <Headlines run={run} steps={steps} />
      <TimeSpent run={run} />
      <AnyMetric run={run} steps={steps} />
      {commands.length ? (
        <details class="card">
          <summary>{t("overview.commands")}</summary>
          <div class="stack tight padded">
            {commands.map(([name, text]) => (
              <div>
                <div class="dim small">{named("command", name)}</div>
                <Command text={text} />
              </div>
            ))}
          </div>
        </details>
      ) : null}
      <Facts run={run} />
    </div>
  );
}
