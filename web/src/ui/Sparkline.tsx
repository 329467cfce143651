// A curve as small as a word.

import type { Num } from "../api/types";
import { number } from "../format";
import { t } from "../i18n";

const WIDTH = 120;
const HEIGHT = 28;

export function Sparkline({ values }: { values: Num[] }) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) return <span class="dim">–</span>;
  const low = Math.min(...known);
  const high = Math.max(...known);
  const x = (i: number) => 2 + (i / (values.length - 1)) * (WIDTH - 4);
  const y = (value: number) =>
    high === low ? HEIGHT / 2 : HEIGHT - 3 - ((value - low) / (high - low)) * (HEIGHT - 6);
  const points = values
    .map((value, i) => (value === null ? null : `${x(i).toFixed(1)},${y(value).toFixed(1)}`))
    .filter(Boolean)
    .join(" ");
  const last = known[known.length - 1]!;
  const label = t("chart.spark", { first: number(known[0]), last: number(last) });
  return (
    <svg class="spark" width={WIDTH} height={HEIGHT} viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label}>
      <polyline points={points} />
      <circle cx={x(values.length - 1)} cy={y(last)} r="2" />
    </svg>
  );
}
