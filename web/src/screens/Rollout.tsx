// One rollout: conversation and tokens in sync, a strip per stream, the reward and its siblings.

import { useEffect, useMemo, useState } from "preact/hooks";
import { useApi } from "../api/client";
import type { Message, Rollout as Data } from "../api/types";
import { groupName, number, pretty, signed } from "../format";
import { named, t } from "../i18n";
import { told } from "../i18n/told";
import { useKeys } from "../keys";
import { go, links, route, setQuery } from "../route";
import { acting, serves } from "../session";
import { Conversation, RewardTree, Siblings, ToolCalls } from "../rollout/Parts";
import { Strips } from "../rollout/Strips";
import { streamsOf, type Stream, type StreamName } from "../rollout/streams";
import { TokenText } from "../rollout/TokenText";
import { Command, Section } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { JsonLink, LongText } from "../ui/LongText";
import { Failure, Loaded, Notice } from "../ui/State";
import { useJob } from "./Export";
import { useRun } from "./Run";

function Facts({ data, run }: { data: Data; run: string }) {
  return (
    <dl class="chips">
      <div>
        <dt>{t("word.reward")}</dt>
        <dd>{number(data.reward)}</dd>
      </div>
      <div>
        <dt>{t("word.advantage")}</dt>
        <dd>{signed(data.advantage)}</dd>
      </div>
      <div>
        <dt>{t("word.tokens")}</dt>
        <dd>{number(data.tokens.id.length)}</dd>
      </div>
      <div>
        <dt>{t("word.turns")}</dt>
        <dd>{number(data.turns)}</dd>
      </div>
      <div>
        <dt>{t("word.stop")}</dt>
        <dd>{data.stop ? named("stop", data.stop) : "–"}</dd>
      </div>
      <div>
        <dt>{t("word.version")}</dt>
        <dd>{number(data.version)}</dd>
      </div>
      {data.group !== null ? (
        <div>
          <dt>{t("word.group")}</dt>
          <dd>
            <a href={links.group(run, data.split, data.step, data.group)}>{groupName(data.group)}</a>
          </dd>
        </div>
      ) : null}
      {data.data_source ? (
        <div>
          <dt>{t("word.source")}</dt>
          <dd>{data.data_source}</dd>
        </div>
      ) : null}
    </dl>
  );
}

function TokenFacts({ data, streams, chosen }: { data: Data; streams: Stream[]; chosen: number | null }) {
  if (chosen === null || chosen >= data.tokens.id.length) {
    return <p class="dim small token-facts">{t("rollout.point")}</p>;
  }
  return (
    <dl class="token-facts" aria-live="polite">
      <div>
        <dt>{t("rollout.position")}</dt>
        <dd>{number(chosen)}</dd>
      </div>
      <div>
        <dt>{t("rollout.token")}</dt>
        <dd>
          <code>{JSON.stringify(data.tokens.text[chosen] ?? "")}</code> <span class="dim">#{data.tokens.id[chosen]}</span>
        </dd>
      </div>
      {streams
        .filter((stream) => stream.values !== null)
        .map((stream) => (
          <div>
            <dt>{t(stream.label)}</dt>
            <dd>{stream.name === "mask" ? t(stream.values![chosen] ? "mask.yes" : "mask.no") : stream.show(stream.values![chosen] ?? null)}</dd>
          </div>
        ))}
    </dl>
  );
}

function Legend({ stream }: { stream: Stream }) {
  if (stream.shape === "centred") {
    return (
      <span class="legend small">
        <i class="below4" /> {stream.show(stream.middle - stream.extent)} <i class="level" /> {number(stream.middle)}{" "}
        <i class="above4" /> {stream.show(stream.middle + stream.extent)}
      </span>
    );
  }
  if (stream.shape === "block") {
    return (
      <span class="legend small">
        <i class="trained" /> {t("mask.yes")} <i class="masked" /> {t("mask.no")}
      </span>
    );
  }
  if (stream.shape === "class") return null;
  return (
    <span class="legend small">
      <i class="depth0" /> {stream.shape === "falls" ? t("legend.likely") : "0"} <i class="depth6" />{" "}
      {stream.shape === "falls" ? t("legend.unlikely") : stream.show(stream.extent)}
    </span>
  );
}

/** Why strips are empty: each reason once, with the strips it holds for. */
function Missing({ streams }: { streams: Stream[] }) {
  const reasons = new Map<string, string[]>();
  for (const stream of streams) {
    if (stream.values !== null || stream.missing === null) continue;
    reasons.set(stream.missing, [...(reasons.get(stream.missing) ?? []), t(stream.label)]);
  }
  return (
    <ul class="missing dim small">
      {[...reasons].map(([reason, names]) => (
        <li>
          <strong>{names.join(", ")}:</strong> {told(reason)}
        </li>
      ))}
    </ul>
  );
}

/** Numbers that the files lack, by a replay of the step on request; what came of it. */
function Replayed({ data, run }: { data: Data; run: string }) {
  const { error, busy, start } = useJob();
  if (data.replayed) {
    return <p class={`small ${data.replayed.is_equal ? "dim" : "warn-text"}`}>{t(data.replayed.is_equal ? "replay.equal" : "replay.unequal")}</p>;
  }
  if (data.split !== "train" || data.tokens.advantage === null || !acting.value || !serves("/runs/{}/replay")) return null;
  return (
    <div class="row padded-top">
      <button disabled={busy} onClick={() => void start(`/runs/${encodeURIComponent(run)}/replay`, { step: data.step })}>
        <Icon name="play" /> {t("replay.start")}
      </button>
      <span class="dim small">{t("replay.what")}</span>
      {error ? <Failure error={error} /> : null}
    </div>
  );
}

function TokenPanel({ data, run, chosen, range, choose }: {
  data: Data;
  run: string;
  chosen: number | null;
  range: [number, number] | null;
  choose: (position: number) => void;
}) {
  const streams = useMemo(() => streamsOf(data), [data]);
  const wanted = route.value.query.get("colour") as StreamName | null;
  const usable = streams.filter((stream) => stream.values !== null);
  const otherwise = usable.find((one) => one.name === "advantage" && one.extent !== 1) ?? usable.find((one) => one.name === "sampler_logprob");
  const stream = usable.find((one) => one.name === wanted) ?? otherwise ?? streams.find((one) => one.name === "mask")!;
  return (
    <>
      <Section
        title={t("rollout.tokens")}
        aside={
          <div class="row">
            <Legend stream={stream} />
            <label class="row" for="colour">
              {t("rollout.colour")}
            </label>
            <select id="colour" class="auto" value={stream.name} onChange={(event) => setQuery({ colour: event.currentTarget.value })}>
              {usable.map((one) => (
                <option value={one.name}>{t(one.label)}</option>
              ))}
            </select>
          </div>
        }
      >
        <div class="card flush">
          <TokenText texts={data.tokens.text} stream={stream} chosen={chosen} range={range} choose={choose} />
          <TokenFacts data={data} streams={streams} chosen={chosen} />
          {data.tokens.left_out ? <p class="dim small padded">{t("rollout.leftout", { count: number(data.tokens.left_out) })}</p> : null}
        </div>
      </Section>
      <Section title={t("rollout.strips")} aside={<span class="dim small">{t("strips.hint")}</span>}>
        <div class="card">
          <Strips streams={streams} count={data.tokens.id.length} chosen={chosen} choose={choose} />
          <Missing streams={streams} />
          <Replayed data={data} run={run} />
        </div>
      </Section>
    </>
  );
}

function Side({ data, run }: { data: Data; run: string }) {
  const commands = Object.entries(data.commands).filter((pair): pair is [string, string] => !!pair[1]);
  return (
    <div class="rollout-side stack">
      <Section title={t("rollout.reward")}>
        <div class="card">
          {data.reward_tree ? <RewardTree node={data.reward_tree} /> : <p class="dim">{t("rollout.notree")}</p>}
          {data.ground_truth !== null && data.ground_truth !== undefined ? (
            <div class="small truth">
              <span class="dim">{t("rollout.truth")}</span>
              <LongText text={pretty(data.ground_truth)} mono />
            </div>
          ) : null}
        </div>
      </Section>
      {data.tool_calls.length ? (
        <Section title={t("rollout.calls")}>
          <div class="card">
            <ToolCalls calls={data.tool_calls} />
          </div>
        </Section>
      ) : null}
      {data.siblings.length ? (
        <Section
          title={t("rollout.siblings")}
          aside={data.group !== null ? <a href={links.group(run, data.split, data.step, data.group)}>{t("rollout.side")}</a> : null}
        >
          <div class="card">
            <Siblings run={run} rollout={data} />
          </div>
        </Section>
      ) : null}
      {commands.length ? (
        <Section title={t("overview.commands")}>
          <div class="card stack tight">
            {commands.map(([name, text]) => (
              <div>
                <div class="dim small">{named("command", name)}</div>
                <Command text={text} />
              </div>
            ))}
          </div>
        </Section>
      ) : null}
    </div>
  );
}

/** Neighbours by index within the step, and among the siblings. */
function useNeighbours(run: string, data: Data | null) {
  const to = (index: number) => data && go(links.rollout(run, data.split, data.step, index, { colour: route.peek().query.get("colour") }));
  const sibling = (by: number) => {
    const all = data?.siblings.map((one) => one.index) ?? [];
    const next = all[all.indexOf(data!.index) + by];
    if (next !== undefined) to(next);
  };
  useKeys((key) => {
    if (!data) return false;
    if (key === "ArrowLeft" && data.index > 0) to(data.index - 1);
    else if (key === "ArrowRight") to(data.index + 1);
    else if (key === "[") sibling(-1);
    else if (key === "]") sibling(1);
    else return false;
    return true;
  });
  return to;
}

function Whole({ data, run, to, path }: { data: Data; run: string; to: (index: number) => void; path: string }) {
  const asked = route.value.query.get("token");
  const [chosen, setChosen] = useState<number | null>(asked === null ? null : Number(asked));
  const [range, setRange] = useState<[number, number] | null>(null);
  useEffect(() => {
    setChosen(asked === null ? null : Number(asked));
    setRange(null);
  }, [data]);
  const choose = (position: number) => {
    setChosen(position);
    setQuery({ token: position });
  };
  const follow = (message: Message) => {
    setRange([message.start!, message.end!]);
    choose(message.start!);
  };
  return (
    <div class="stack">
      <div class="row between">
        <h2>
          {t("rollout.title", { step: number(data.step), index: data.index })}{" "}
          {data.split === "validation" ? <span class="tag">{t("split.validation")}</span> : null}
        </h2>
        <div class="row">
          <button onClick={() => to(data.index - 1)} disabled={data.index === 0}>
            <Icon name="left" /> {t("action.previous")}
          </button>
          <button onClick={() => to(data.index + 1)}>
            {t("action.next")} <Icon name="right" />
          </button>
          <a class="button" href={links.rollouts(run, { start: data.step, end: data.step, split: data.split })}>
            {t("rollout.step")}
          </a>
          <JsonLink path={path} />
        </div>
      </div>
      <Facts data={data} run={run} />
      {data.fault ? (
        <Notice level="bad">
          <strong>{t("word.fault")}</strong>
          <span class="text">{data.fault}</span>
        </Notice>
      ) : null}
      {data.advantage_reason ? (
        <Notice>
          <strong>{t("rollout.why")}</strong>
          <span>{told(data.advantage_reason)}</span>
        </Notice>
      ) : null}
      <div class="rollout-main">
        <div class="stack">
          <Section title={t("rollout.conversation")}>
            <Conversation messages={data.messages} chosen={chosen} choose={follow} />
            {data.earlier?.length ? (
              <details class="card">
                <summary>{t("rollout.branches", { count: number(data.earlier.length) })}</summary>
                <div class="stack padded">
                  {data.earlier.map((branch) => (
                    <Conversation messages={branch} chosen={null} choose={() => undefined} />
                  ))}
                </div>
              </details>
            ) : null}
          </Section>
          <TokenPanel data={data} run={run} chosen={chosen} range={range} choose={choose} />
        </div>
        <Side data={data} run={run} />
      </div>
    </div>
  );
}

export function Rollout({ split, step, index }: { split: string; step: string; index: string }) {
  const { run } = useRun();
  const path = `/runs/${encodeURIComponent(run.id)}/rollouts/${split}/${step}/${index}`;
  const answer = useApi<Data>(path);
  const to = useNeighbours(run.id, answer.data);
  return <Loaded answer={answer}>{(data) => <Whole data={data} run={run.id} to={to} path={path} />}</Loaded>;
}
