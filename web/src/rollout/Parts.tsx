// Parts of the rollout screen: conversation, reward tree, tool calls, siblings.

import type { Message, RewardNode, Rollout, ToolCall } from "../api/types";
import { number, plain, pretty, seconds, signed, visible } from "../format";
import { named, t } from "../i18n";
import { links } from "../route";
import { Advantage } from "../screens/Rollouts";
import { LongText } from "../ui/LongText";

interface ConversationProps {
  messages: Message[];
  chosen: number | null;
  choose: (message: Message) => void;
}

function holds(message: Message, token: number | null): boolean {
  return token !== null && message.start !== null && message.end !== null && token >= message.start && token < message.end;
}

/** A tool call as `name({...})`; what came back is the next message. */
function written(call: unknown): string {
  const { name, arguments: given } = (call ?? {}) as { name?: unknown; arguments?: unknown };
  return typeof name === "string" ? `${name}(${plain(given)})` : pretty(call);
}

export function Conversation({ messages, chosen, choose }: ConversationProps) {
  return (
    <ol class="conversation">
      {messages.map((message) => (
        <li class={`message ${message.role}${holds(message, chosen) ? " chosen" : ""}`}>
          <div class="row between">
            <strong class="small">
              {named("role", message.role)} {message.loss ? <span class="tag live">{t("rollout.trained")}</span> : null}
            </strong>
            {message.start !== null && message.end !== null ? (
              <button class="plain small" onClick={() => choose(message)}>
                {t("rollout.range", { start: number(message.start), end: number(message.end) })}
              </button>
            ) : null}
          </div>
          {message.content ? <LongText text={message.content} /> : null}
          {(message.tool_calls ?? []).map((call) => (
            <code class="call">{visible(written(call))}</code>
          ))}
        </li>
      ))}
    </ol>
  );
}

export function RewardTree({ node, depth = 0 }: { node: RewardNode; depth?: number }) {
  const children = node.children ?? [];
  const detail = node.detail === null || node.detail === undefined ? "" : plain(node.detail);
  return (
    <ul class={depth ? "tree" : "tree root"}>
      <li>
        <div class="row">
          <span>{node.name}</span>
          <strong class="num">{node.fault ? "–" : number(node.score)}</strong>
          {node.weight !== null && node.weight !== undefined && node.weight !== 1 ? (
            <span class="dim small">× {number(node.weight)}</span>
          ) : null}
          {node.fault ? <span class="tag bad long">{node.fault}</span> : null}
        </div>
        {detail && detail !== "{}" ? (
          <details class="small">
            <summary>{t("rollout.detail")}</summary>
            <pre>{visible(pretty(node.detail))}</pre>
          </details>
        ) : null}
        {node.reply ? (
          <details class="small">
            <summary>{t("rewards.reply")}</summary>
            <LongText text={node.reply} />
          </details>
        ) : null}
        {children.map((child) => (
          <RewardTree node={child} depth={depth + 1} />
        ))}
      </li>
    </ul>
  );
}

export function ToolCalls({ calls }: { calls: ToolCall[] }) {
  return (
    <ol class="tool-calls">
      {calls.map((call) => (
        <li>
          <div class="row between">
            <strong class="mono">{call.name}</strong>
            <span class="dim small">
              {call.turn !== null ? `${t("rollout.turn", { turn: number(call.turn) })} · ` : ""}
              {seconds(call.seconds)}
            </span>
          </div>
          {call.error ? <p class="bad-text small text">{visible(call.error)}</p> : null}
          <div class="columns small">
            <div>
              <span class="dim">{t("rollout.arguments")}</span>
              <LongText text={pretty(call.arguments)} mono />
            </div>
            <div>
              <span class="dim">{t("rollout.result")}</span>
              <LongText text={pretty(call.result)} mono />
            </div>
          </div>
        </li>
      ))}
    </ol>
  );
}

export function Siblings({ run, rollout }: { run: string; rollout: Rollout }) {
  return (
    <ul class="sibling-list">
      {rollout.siblings.map((one) => (
        <li>
          <a
            href={links.rollout(run, rollout.split, rollout.step, one.index)}
            aria-current={one.index === rollout.index ? "true" : undefined}
            title={`${t("word.reward")} ${number(one.reward)}, ${t("word.advantage")} ${signed(one.advantage)}`}
          >
            <span class="dim">{one.index}</span>
            <strong class="num">{number(one.reward)}</strong>
            <Advantage value={one.advantage} />
            <span class="dim num">{number(one.tokens)}</span>
          </a>
        </li>
      ))}
    </ul>
  );
}
