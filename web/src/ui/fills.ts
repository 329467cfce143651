// Which colour a part of a bar has: a phase, or a kind of memory, has the same one on every screen.

const KNOWN: Record<string, number> = {
  generate: 0,
  update: 1,
  validate: 2,
  score: 3,
  digest: 4,
  "log-probs": 5,
  log_probs: 5,
  publish: 6,
  checkpoint: 7,
  save: 7,
  weights: 0,
  optimizer: 1,
  "kv cache": 2,
  gradients: 3,
  activations: 4,
  embedding: 5,
};
const COLOURS = 8;

/** The number of the colour of each name; names that are not known take those that are left. */
export function fills(names: string[]): number[] {
  const used = new Set(names.map((name) => KNOWN[name]));
  const free = Array.from({ length: COLOURS }, (_, i) => i).filter((i) => !used.has(i));
  let next = 0;
  return names.map((name) => KNOWN[name] ?? (free.length ? free[next++ % free.length]! : next++ % COLOURS));
}
