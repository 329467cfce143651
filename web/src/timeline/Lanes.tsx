// Lanes of spans on a canvas: Ctrl and the wheel to zoom, drag to move, point to read.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Span, Timeline } from "../api/types";
import { number, seconds } from "../format";
import { named, t } from "../i18n";
import { dark, language } from "../settings";
import { fills } from "../ui/fills";

const LANE = 34;
const TOP = 44;
const TICKS = 22;

/** Width of the names: less on a phone. */
function labelWidth(width: number): number {
  return Math.min(150, Math.round(width * 0.3));
}

interface View {
  from: number;
  to: number;
}

interface Pointed {
  x: number;
  y: number;
  span: Span;
}

/** Distinct names of spans, in order of their first start. */
export function spanNames(data: Timeline): string[] {
  const names = new Set<string>();
  data.lanes.forEach((lane) => lane.spans.forEach((span) => names.add(span.name)));
  return [...names];
}

export function bounds(data: Timeline): View {
  let from = Infinity;
  let to = -Infinity;
  for (const lane of data.lanes) {
    for (const span of lane.spans) {
      from = Math.min(from, span.start);
      to = Math.max(to, span.end);
    }
  }
  return from < to ? { from, to } : { from: 0, to: 1 };
}

const MINUTE = 60;
/** Ticks from a minute on: round numbers of minutes, hours and days. */
const LONG = [1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 720, 1440, 2880, 7200, 14400].map((minutes) => minutes * MINUTE);

/** Seconds between two ticks of which at most so many fit. */
function tick(length: number, most: number): number {
  const rough = length / most;
  const long = LONG.find((size) => size >= rough);
  if (rough > MINUTE / 2 && long !== undefined) return long;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? power * 10;
}

interface Painting {
  canvas: HTMLCanvasElement;
  data: Timeline;
  names: string[];
  view: View;
  zero: number;
}

function paint({ canvas, data, names, view, zero }: Painting): void {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = TOP + data.lanes.length * LANE;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const label = labelWidth(width);
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const ink = (name: string) => style.getPropertyValue(name).trim();
  const scale = (width - label) / (view.to - view.from);
  const x = (time: number) => label + (time - view.from) * scale;
  context.font = `12px ${ink("--font")}`;
  context.textBaseline = "middle";
  const size = tick(view.to - view.from, Math.max(2, Math.min(8, Math.floor((width - label) / 60))));
  for (let at = Math.ceil((view.from - zero) / size) * size; zero + at <= view.to; at += size) {
    context.fillStyle = ink("--line");
    context.fillRect(x(zero + at), TICKS, 1, height - TICKS);
    context.fillStyle = ink("--dim");
    const text = seconds(at);
    const left = x(zero + at) + 3;
    if (left + context.measureText(text).width <= width) context.fillText(text, left, TICKS / 2);
  }
  const inks = fills(names).map((i) => ink(`--c${i}`));
  data.lanes.forEach((lane, i) => {
    const top = TOP + i * LANE;
    context.fillStyle = ink("--line");
    context.fillRect(0, top + LANE - 1, width, 1);
    for (const span of lane.spans) {
      if (span.end < view.from || span.start > view.to) continue;
      const left = Math.max(label, x(span.start));
      const wide = Math.max(1, Math.min(width, x(span.end)) - left);
      context.fillStyle = inks[names.indexOf(span.name)]!;
      context.fillRect(left, top + 5, wide > 3 ? wide - 1 : wide, LANE - 11);
    }
    context.fillStyle = ink("--surface");
    context.fillRect(0, top, label, LANE - 1);
    context.fillStyle = ink("--fg");
    context.fillText(lane.name, 0, top + LANE / 2, label - 8);
  });
  context.strokeStyle = ink("--fg");
  context.setLineDash([3, 3]);
  let labelled = -Infinity;
  for (const one of data.versions) {
    if (one.time < view.from || one.time > view.to) continue;
    const at = Math.round(x(one.time)) + 0.5;
    context.beginPath();
    context.moveTo(at, TICKS);
    context.lineTo(at, height);
    context.stroke();
    if (at - labelled > 26) {
      context.fillStyle = ink("--fg");
      context.fillText(`v${one.version}`, at + 3, (TICKS + TOP) / 2);
      labelled = at;
    }
  }
}

export function Lanes({ data, onStep }: { data: Timeline; onStep: (step: number) => void }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const whole = useMemo(() => bounds(data), [data]);
  const names = useMemo(() => spanNames(data), [data]);
  const [view, setView] = useState(whole);
  const [size, setSize] = useState(0);
  const [pointed, setPointed] = useState<Pointed | null>(null);
  const drag = useRef<{ x: number; view: View } | null>(null);
  useEffect(() => setView(whole), [whole]);
  useEffect(() => {
    const element = canvas.current!;
    const watch = new ResizeObserver(() => setSize(element.clientWidth));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    paint({ canvas: canvas.current!, data, names, view, zero: whole.from });
  }, [data, names, view, size, dark.value, language.value]);
  const time = (event: MouseEvent): number => {
    const box = canvas.current!.getBoundingClientRect();
    return view.from + ((event.clientX - box.left - labelWidth(box.width)) / (box.width - labelWidth(box.width))) * (view.to - view.from);
  };
  const clamp = (from: number, length: number): View => {
    const start = Math.max(whole.from, Math.min(whole.to - length, from));
    return { from: start, to: start + length };
  };
  const zoomBy = (factor: number, at: number) => {
    const length = view.to - view.from;
    const next = Math.max((whole.to - whole.from) / 20000, Math.min(whole.to - whole.from, length * factor));
    setView(clamp(at - ((at - view.from) / length) * next, next));
  };
  const find = (event: PointerEvent): Span | null => {
    const box = canvas.current!.getBoundingClientRect();
    const lane = data.lanes[Math.floor((event.clientY - box.top - TOP) / LANE)];
    const at = time(event);
    const near = ((view.to - view.from) / box.width) * 2;
    const found = lane?.spans.filter((span) => at >= span.start - near && at <= span.end + near) ?? [];
    return found.sort((a, b) => a.end - a.start - (b.end - b.start))[0] ?? null;
  };
  const move = (event: PointerEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    if (drag.current) {
      const { x, view: old } = drag.current;
      const by = ((x - event.clientX) / (box.width - labelWidth(box.width))) * (old.to - old.from);
      setView(clamp(old.from + by, old.to - old.from));
    }
    const span = drag.current ? null : find(event);
    setPointed(span ? { x: event.clientX - box.left, y: event.clientY - box.top, span } : null);
  };
  const release = (event: PointerEvent) => {
    const still = drag.current && Math.abs(event.clientX - drag.current.x) < 4;
    drag.current = null;
    const span = still ? find(event) : null;
    if (span && span.step !== null) onStep(span.step);
  };
  const key = (event: KeyboardEvent) => {
    const length = view.to - view.from;
    const middle = (view.from + view.to) / 2;
    if (event.key === "+" || event.key === "=") zoomBy(0.7, middle);
    else if (event.key === "-") zoomBy(1.4, middle);
    else if (event.key === "ArrowLeft") setView(clamp(view.from - length / 5, length));
    else if (event.key === "ArrowRight") setView(clamp(view.from + length / 5, length));
    else if (event.key === "0") setView(whole);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="lanes">
      <div class="row lanes-zoom">
        <button onClick={() => zoomBy(0.6, (view.from + view.to) / 2)} aria-label={t("timeline.in")}>
          +
        </button>
        <button onClick={() => zoomBy(1.6, (view.from + view.to) / 2)} aria-label={t("timeline.out")}>
          −
        </button>
        <button onClick={() => setView(whole)}>{t("chart.all")}</button>
        <span class="dim small">{t("timeline.hint")}</span>
      </div>
      <canvas
        ref={canvas}
        style={{ height: `${TOP + data.lanes.length * LANE}px` }}
        tabIndex={0}
        role="img"
        aria-label={t("timeline.label", { lanes: data.lanes.length })}
        onWheel={(event) => {
          if (!(event.ctrlKey || event.metaKey || event.shiftKey)) return; // the wheel scrolls the page
          event.preventDefault();
          zoomBy((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, time(event));
        }}
        onPointerDown={(event) => {
          drag.current = { x: event.clientX, view };
          canvas.current!.setPointerCapture(event.pointerId);
        }}
        onPointerMove={move}
        onPointerUp={release}
        onPointerLeave={() => setPointed(null)}
        onDblClick={() => setView(whole)}
        onKeyDown={key}
      />
      {pointed ? (
        <div class="tip" style={{ left: `${Math.min(pointed.x + 12, size - 180)}px`, top: `${pointed.y + 56}px` }}>
          <strong>{named("phase", pointed.span.name)}</strong>
          <div>{seconds(pointed.span.end - pointed.span.start)}</div>
          {pointed.span.step !== null ? <div>{t("word.stepn", { step: number(pointed.span.step) })}</div> : null}
          {pointed.span.version !== null ? <div>{`${t("word.version")} ${pointed.span.version}`}</div> : null}
        </div>
      ) : null}
    </div>
  );
}
