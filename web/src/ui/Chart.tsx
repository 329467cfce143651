// Curves over steps, drawn by uPlot: drag to zoom, double click to see all, click a step for its rollouts.

import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import type { Num, Series } from "../api/types";
import { number, percent, visible } from "../format";
import { t } from "../i18n";
import { dark, language } from "../settings";

export interface Curve {
  label: string;
  series: Series;
  colour?: number;
}

interface Props {
  title: string;
  curves: Curve[];
  height?: number;
  sync?: string;
  onStep?: (step: number) => void;
  onZoom?: (range: [number, number] | null) => void;
  legend?: boolean;
  /** Values are shares, from 0 to 1. */
  share?: boolean;
}

/** Curves differ by their dashes too, not by colour alone. */
const DASHES = [[], [7, 3], [2, 3], [10, 3, 2, 3]];

type Column = (number | null | undefined)[];

function colours(): string[] {
  const style = getComputedStyle(document.documentElement);
  return Array.from({ length: 8 }, (_, i) => style.getPropertyValue(`--c${i}`).trim());
}

function faded(colour: string): string {
  return `${colour}33`;
}

function widened(curve: Curve): boolean {
  const { low, high, value } = curve.series;
  return !!low && !!high && low.some((one, i) => one !== value[i] || high[i] !== value[i]);
}

/** Columns on one axis, and where the columns of each curve's interval are. */
function columns(curves: Curve[]) {
  const tables: uPlot.AlignedData[] = [];
  const bands: { curve: number; low: number; high: number }[] = [];
  let column = 1;
  const place: number[] = [];
  curves.forEach((curve, i) => {
    const { step, value, low, high } = curve.series;
    place.push(column);
    if (widened(curve)) {
      tables.push([step, value, low!, high!] as uPlot.AlignedData);
      bands.push({ curve: i, low: column + 1, high: column + 2 });
      column += 3;
    } else {
      tables.push([step, value] as uPlot.AlignedData);
      column += 1;
    }
  });
  const data = tables.length === 1 ? tables[0]! : uPlot.join(tables);
  return { data, bands, place, width: column };
}

/** The range of the values with a margin; one value alone lies in the middle. */
function spread(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const margin = (high - low) * 0.08;
  return [low - margin, high + margin];
}

/** The same of shares, which are not below 0 or above 1. */
function spreadShare(plot: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === high) return [0, 1];
  const [from, to] = spread(plot, low, high);
  return [Math.max(0, from), Math.min(1, to)];
}

/** The steps, which are whole numbers; one step alone lies in the middle. */
function steps({ data }: uPlot, first: number | null, last: number | null): [number, number] {
  const known = data[0];
  if (first === null || last === null || known.length === 0) return [0, 1];
  return known.length === 1 ? [known[0]! - 1, known[0]! + 1] : [first, last];
}

/** Distances of the lines of an axis of steps. */
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();

function axes(format: (value: Num) => string): uPlot.Axis[] {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--dim").trim();
  const grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
  const font = `12px ${style.getPropertyValue("--font")}`;
  const shared = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font };
  return [
    { ...shared, size: 32, incrs: WHOLE, values: (_, ticks) => ticks.map((tick) => number(tick)) },
    { ...shared, size: 58, space: 24, values: (_, ticks) => ticks.map((tick) => format(tick)) },
  ];
}

function drawn(curves: Curve[], shape: ReturnType<typeof columns>, format: (value: Num) => string): uPlot.Series[] {
  const ink = colours();
  const value = (_: uPlot, raw: number | null) => format(raw);
  const series: uPlot.Series[] = [{ label: t("word.step"), value: (_, raw) => number(raw) }];
  curves.forEach((curve, i) => {
    const colour = ink[(curve.colour ?? i) % ink.length]!;
    series[shape.place[i]!] = {
      label: visible(curve.label),
      stroke: colour,
      value,
      width: 1.75,
      dash: DASHES[i % DASHES.length],
      spanGaps: true,
      points: { show: curve.series.step.length < 40, size: 5, fill: colour },
    };
  });
  for (const band of shape.bands) {
    const colour = ink[(curves[band.curve]!.colour ?? band.curve) % ink.length]!;
    const words = curves[band.curve]!.series.interval ? ([t("chart.low"), t("chart.high")] as const) : (["min", "max"] as const);
    for (const [at, word] of [
      [band.low, words[0]],
      [band.high, words[1]],
    ] as const) {
      series[at] = { label: word, value, stroke: faded(colour), width: 0.5, points: { show: false }, spanGaps: true };
    }
  }
  return series;
}

export function summary(curve: Curve): string {
  const known = curve.series.value.filter((one): one is number => one !== null);
  if (known.length === 0) return t("chart.empty");
  return t("chart.summary", {
    name: curve.label,
    first: number(known[0]),
    last: number(known[known.length - 1]),
    low: number(Math.min(...known)),
    high: number(Math.max(...known)),
  });
}

export function Chart({ title, curves, height = 180, sync, onStep, onZoom, legend, share }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const actions = useRef({ onStep, onZoom });
  actions.current = { onStep, onZoom };
  const format = share ? percent : number;
  const shape = useMemo(() => columns(curves), [curves]);
  const points = shape.data[0]?.length ?? 0;
  const key = `${dark.value}${language.value}${curves.map((curve) => `${curve.label}${curve.colour}`).join()}${shape.width}${height}`;
  useEffect(() => {
    const box = place.current;
    if (box === null || points === 0) return;
    const ink = colours();
    const made = new uPlot(
      {
        width: Math.max(box.clientWidth, 200),
        height,
        series: drawn(curves, shape, format),
        bands: shape.bands.map((band) => ({
          series: [band.high, band.low],
          fill: faded(ink[(curves[band.curve]!.colour ?? band.curve) % ink.length]!),
        })),
        axes: axes(format),
        scales: { x: { time: false, range: steps }, y: { range: share ? spreadShare : spread } },
        legend: { show: legend ?? curves.length > 1, live: true },
        cursor: { sync: sync ? { key: sync } : undefined, drag: { x: true, y: false }, points: { size: 7 } },
        hooks: {
          setSelect: [
            (self) => {
              const { left, width } = self.select;
              if (width < 4) return;
              actions.current.onZoom?.([self.posToVal(left, "x"), self.posToVal(left + width, "x")]);
            },
          ],
        },
      },
      shape.data,
      box,
    );
    plot.current = made;
    let pressed = 0;
    made.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    made.over.addEventListener("click", (event) => {
      const index = made.cursor.idx;
      if (Math.abs(event.clientX - pressed) > 3 || index === null || index === undefined) return;
      const step = made.data[0][index];
      if (step !== undefined) actions.current.onStep?.(step);
    });
    made.over.addEventListener("dblclick", () => actions.current.onZoom?.(null));
    const watch = new ResizeObserver(() => made.setSize({ width: Math.max(box.clientWidth, 200), height }));
    watch.observe(box);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [key, points === 0]);
  useEffect(() => {
    plot.current?.setData(shape.data as [number[], ...Column[]]);
  }, [shape]);
  return (
    <figure class={`chart${onStep ? " linked" : ""}`}>
      <figcaption class="hidden">{`${title}. ${curves.map(summary).join(". ")}`}</figcaption>
      {points === 0 ? <p class="dim small chart-empty">{t("chart.empty")}</p> : <div ref={place} aria-hidden="true" />}
    </figure>
  );
}

export function lastOf(values: Num[]): Num {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]!;
  return null;
}
