// What is known of each token: streams of numbers, and the bucket of a value on its colour scale.

import type { Num, Rollout, Tokens } from "../api/types";
import { fixed, number, signed } from "../format";
import type { Key } from "../i18n";

export type StreamName =
  | "sampler_logprob"
  | "trainer_logprob"
  | "gap"
  | "ratio"
  | "mask"
  | "advantage"
  | "entropy"
  | "version";

/** `falls`: 0 at the top, more negative is lower. `centred`: up and down from a middle. `rises`: from the bottom. */
export type Shape = "falls" | "centred" | "rises" | "block" | "class";

export interface Stream {
  name: StreamName;
  label: Key;
  shape: Shape;
  middle: number;
  values: Num[] | null;
  missing: string | null;
  /** The largest distance from the middle, by which the strip and the colours are scaled. */
  extent: number;
  show: (value: Num) => string;
}

function extent(values: Num[] | null, middle: number): number {
  let most = 0;
  for (const value of values ?? []) if (value !== null) most = Math.max(most, Math.abs(value - middle));
  return most || 1;
}

function gaps(tokens: Tokens): Num[] | null {
  const { sampler_logprob: ours, trainer_logprob: theirs } = tokens;
  if (!ours || !theirs) return null;
  return ours.map((value, i) => (value === null || theirs[i] === null ? null : theirs[i]! - value));
}

export function streamsOf(rollout: Rollout): Stream[] {
  const { tokens, missing } = rollout;
  const mask = tokens.mask.map((one) => Number(one));
  const make = (name: StreamName, shape: Shape, values: Num[] | null, show = fixed, middle = 0): Stream => ({
    name,
    label: `stream.${name}`,
    shape,
    middle,
    values: values && values.some((value) => value !== null) ? values : null,
    missing: missing[name] ?? (name === "gap" ? (missing.trainer_logprob ?? null) : null),
    extent: extent(values, middle),
    show: (value) => show(value),
  });
  return [
    make("sampler_logprob", "falls", tokens.sampler_logprob),
    make("trainer_logprob", "falls", tokens.trainer_logprob),
    make("gap", "centred", gaps(tokens), number),
    make("ratio", "centred", tokens.ratio, number, 1),
    make("mask", "block", mask, number),
    make("advantage", "centred", tokens.advantage, signed),
    make("entropy", "rises", tokens.entropy),
    make("version", "class", tokens.version, number),
  ];
}

/** The colour class of a token: d-4..d4 for centred scales, q0..q6 for others, none where unknown. */
export function bucket(stream: Stream, position: number): string {
  const value = stream.values?.[position];
  if (value === null || value === undefined) return "unknown";
  switch (stream.shape) {
    case "centred": {
      const part = Math.round(((value - stream.middle) / stream.extent) * 4);
      return part < 0 ? `below${-part}` : part > 0 ? `above${part}` : "level";
    }
    case "block":
      return value ? "trained" : "masked";
    case "class":
      return `kind${Math.abs(value) % 6}`;
    case "falls":
      // by probability: a surprising token is dark
      return `depth${Math.round((1 - Math.exp(value)) * 6)}`;
    case "rises":
      return `depth${Math.round((value / stream.extent) * 6)}`;
  }
}
