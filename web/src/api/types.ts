// The records of `/api/v1`, as the server writes them. A number that is not finite is null.

export type Num = number | null;
export type RunState = "running" | "finished" | "interrupted" | "killed" | "damaged";
export type Split = "train" | "validation";

export interface ErrorBody {
  message: string;
  field: string | null;
  fix: string | null;
}

export interface Session {
  folder: string;
  version: string;
  read_only: boolean;
  trust: boolean;
  languages: string[];
}

export interface RunRow {
  id: string;
  path: string;
  name: string;
  project: string | null;
  stage: string | null;
  algorithm: string | null;
  model: string | null;
  state: RunState;
  step: Num;
  total_steps: Num;
  started: string | number | null;
  updated: string | number | null;
  validation: { name: string; first: Num; last: Num } | null;
  reward_last: Num;
  sparkline: Num[];
  problem: string | null;
  /** In an event: the run is no longer in the folder. */
  removed?: boolean;
}

export interface Finding {
  rule: string;
  level: string;
  message: string;
  title?: string;
  step?: Num;
  key?: string | null;
  evidence?: unknown;
  fix?: string | null;
}

export interface Headline {
  key: string;
  label: string;
  name: string;
  last: Num;
  unit: string | null;
}

export interface Overview extends RunRow {
  verdict: { level: "healthy" | "degraded" | "collapsed" | "unknown"; sentence: string };
  findings: Finding[];
  headline: Headline[];
  time: { phase: string; seconds: number; share: number }[];
  manifest: Record<string, unknown>;
  commands: Record<string, string | null>;
  damage: { file: string; message: string }[];
  /** The doctor still reads; the verdict comes with a later answer. */
  pending?: boolean;
}

export interface MetricNames {
  names: { name: string; category: string; help: string | null }[];
  steps: number;
}

export interface Series {
  step: number[];
  value: Num[];
  low?: Num[];
  high?: Num[];
  /** Whether `low` and `high` are a 95 % interval rather than the extremes of several steps. */
  interval?: boolean;
}

export interface SeriesAnswer {
  series: Record<string, Series>;
  /** Intervals are still being read. */
  pending?: boolean;
  /** Whether the file of metrics was read to its end. */
  is_whole?: boolean;
}

export interface Span {
  name: string;
  start: number;
  end: number;
  step: Num;
  version: Num;
}

export interface Timeline {
  lanes: { name: string; role: string; spans: Span[] }[];
  versions: { time: number; version: number }[];
  idle: { lane: string; seconds: number; share: number }[];
  origin: Num;
  /** The steps that are shown; null where the run has no times. */
  steps: [number, number] | null;
  known_steps?: [number, number] | null;
  gaps?: { start: number; seconds: number; during: string; step: Num }[];
  problem?: string | null;
}

export interface RolloutRow {
  split: Split;
  step: number;
  index: number;
  group: number | string | null;
  reward: Num;
  advantage: Num;
  tokens: Num;
  turns: Num;
  stop: string | null;
  fault: string | null;
  tools: string[];
  version: Num;
  prompt: string;
  answer: string;
}

export interface RolloutPage {
  rows: RolloutRow[];
  cursor: string | null;
  scanned_steps: number;
  total_steps: number;
  /** Steps in the index so far, and steps with a file. */
  indexed_steps: number;
  known_steps: number;
  total_rows: Num;
  choices: { stop: string[]; fault: string[]; tool: string[]; data_source: string[] };
  /** Steps whose file cannot be read, and why. */
  damaged?: Record<string, string>;
}

export interface RewardNode {
  name: string;
  score: Num;
  weight: Num;
  children: RewardNode[] | null;
  detail: unknown;
  fault: string | null;
  /** What a judge said. */
  reply?: string | null;
}

export interface Message {
  role: string;
  content: string | null;
  tool_calls: unknown[] | null;
  start: Num;
  end: Num;
  loss: boolean;
}

export interface Tokens {
  id: number[];
  text: string[];
  mask: (number | boolean)[];
  sampler_logprob: Num[] | null;
  trainer_logprob: Num[] | null;
  ratio: Num[] | null;
  advantage: Num[] | null;
  entropy: Num[] | null;
  version: Num[] | null;
  left_out?: number;
}

export interface ToolCall {
  name: string;
  arguments: unknown;
  result: unknown;
  seconds: Num;
  error: string | null;
  turn: Num;
}

export interface Rollout extends Omit<RolloutRow, "tokens"> {
  messages: Message[];
  tokens: Tokens;
  reward_tree: RewardNode | null;
  tool_calls: ToolCall[];
  ground_truth: unknown;
  data_source: string | null;
  siblings: { index: number; reward: Num; advantage: Num; tokens: Num }[];
  advantage_reason: string | null;
  /** Where a replay of the step measured the tokens: whether it came out as recorded. */
  replayed: { is_equal: boolean } | null;
  missing: Record<string, string>;
  /** Branches that a chat template rewrote. */
  earlier?: Message[][];
  commands: Record<string, string | null>;
}

export interface Group {
  rows: (RolloutRow & { text?: string })[];
  reason: string | null;
  mean: Num;
  std: Num;
}

export interface Rewards {
  components: { name: string; series: Series }[];
  faults: { step: number; name: string; count: number; sample: Num }[];
  judges: {
    step: number;
    index: number;
    component: string;
    answer: string;
    reply: string;
    score: Num;
    seconds: Num;
    fault: string | null;
  }[];
  judging?: Record<string, Series>;
}

export interface Parity {
  series: Record<string, Series>;
  worst: {
    step: number;
    index: number;
    position: number;
    token: string;
    sampler: Num;
    trainer: Num;
    gap: Num;
  }[];
  damage?: { file: string; message: string }[];
}

export interface Faults {
  attempts: number;
  resumptions: { time: string | number | null; step: Num; changed: unknown }[];
  notes: { time: string | number | null; note: string }[];
  digests: { step: number; chain: string; ok: boolean | null }[];
  broken: unknown[];
}

export interface MemoryBar {
  device: string;
  parts: { name: string; bytes: number }[];
  total: number;
  capacity: Num;
}

export interface Plan {
  yaml: string;
  keys: { key: string; value: unknown; source: string | null; help: string | null; default: unknown }[];
  memory: MemoryBar[];
  findings: Finding[];
}

export interface Compare {
  runs: RunRow[];
  config: { key: string; values: Record<string, unknown> }[];
  divergence: { step: Num; stage: string | null; equal_steps: Num; message: string } | null;
  names: string[];
}

export interface Recipe {
  name: string;
  title: string;
  yaml: string;
}

export interface Check {
  ok: boolean;
  findings: Finding[];
  plan: { lines: string[]; memory: MemoryBar[] } | null;
  yaml: string | null;
  command: string | null;
  /** Every key with the value that it would have, also those of files that `defaults` names. */
  config?: Record<string, unknown>;
}

export interface Job {
  id: string;
  name: string;
  state: "queued" | "running" | "finished" | "failed" | "stopped";
  run_id: string | null;
  step: Num;
  total_steps: Num;
  created: string | number | null;
  command: string;
  error: string | null;
  is_server: boolean;
  url: string | null;
}

export interface Jobs {
  jobs: Job[];
  running_limit: number;
}

export interface ChatSource {
  kind: "checkpoint" | "url";
  label: string;
  run_id?: string;
  step?: number;
  tools?: boolean;
  url?: string;
}

export interface RowPart {
  name: string;
  stretches: { text: string; who: string; is_learned: boolean }[];
  length: number;
  learned: number;
  notes: string[];
}

export interface DataPreview {
  rows: { at: string; parts: RowPart[]; problems: string[] }[];
  problems: { at: string; message: string }[];
  findings: Finding[];
}
