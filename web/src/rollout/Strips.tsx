// A strip per stream over all tokens, on one canvas: Ctrl and the wheel to zoom, drag to move, click to read.

import { useEffect, useRef, useState } from "preact/hooks";
import { t } from "../i18n";
import { dark } from "../settings";
import type { Stream } from "./streams";

const LANE = 34;
const LABEL = 116;

interface View {
  first: number;
  last: number;
}

interface Ink {
  line: string;
  dim: string;
  fg: string;
  accent: string;
  up: string;
  down: string;
  kinds: string[];
}

function inks(): Ink {
  const style = getComputedStyle(document.documentElement);
  const get = (name: string) => style.getPropertyValue(name).trim();
  return {
    line: get("--line"),
    dim: get("--dim"),
    fg: get("--fg"),
    accent: get("--accent"),
    up: get("--c0"),
    down: get("--c1"),
    kinds: [0, 2, 3, 4, 5, 6].map((i) => get(`--c${i}`)),
  };
}

/** The value of a pixel column that holds several tokens: the one farthest from the middle. */
function farthest(stream: Stream, from: number, to: number): number | null {
  let found: number | null = null;
  for (let i = from; i < to; i++) {
    const value = stream.values![i];
    if (value === null || value === undefined) continue;
    if (found === null || Math.abs(value - stream.middle) > Math.abs(found - stream.middle)) found = value;
  }
  return found;
}

function paintBar(context: CanvasRenderingContext2D, stream: Stream, value: number, x: number, width: number, top: number, ink: Ink) {
  const height = LANE - 8;
  const part = Math.min(1, Math.abs(value - stream.middle) / stream.extent);
  switch (stream.shape) {
    case "falls":
      context.fillStyle = ink.up;
      context.fillRect(x, top, width, Math.max(1, part * height));
      break;
    case "rises":
      context.fillStyle = ink.up;
      context.fillRect(x, top + height - Math.max(1, part * height), width, Math.max(1, part * height));
      break;
    case "centred": {
      const size = Math.max(1, (part * height) / 2);
      context.fillStyle = value >= stream.middle ? ink.up : ink.down;
      context.fillRect(x, value >= stream.middle ? top + height / 2 - size : top + height / 2, width, size);
      break;
    }
    case "block":
      if (value) {
        context.fillStyle = ink.accent;
        context.fillRect(x, top + 4, width, height - 8);
      }
      break;
    case "class":
      context.fillStyle = ink.kinds[Math.abs(value) % ink.kinds.length]!;
      context.fillRect(x, top + 4, width, height - 8);
  }
}

function paint(canvas: HTMLCanvasElement, streams: Stream[], view: View, chosen: number | null) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = streams.length * LANE;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  const ink = inks();
  const area = width - LABEL;
  const count = view.last - view.first;
  const size = area / count;
  context.font = `12px ${getComputedStyle(document.documentElement).getPropertyValue("--font")}`;
  context.textBaseline = "middle";
  streams.forEach((stream, lane) => {
    const top = lane * LANE + 4;
    context.fillStyle = ink.dim;
    context.fillText(t(stream.label), 0, top + (LANE - 8) / 2, LABEL - 8);
    context.fillStyle = ink.line;
    context.fillRect(LABEL, (lane + 1) * LANE - 1, area, 1);
    if (stream.values === null) {
      context.fillStyle = ink.dim;
      context.fillText(t("stream.missing"), LABEL + 4, top + (LANE - 8) / 2, area - 8);
      return;
    }
    if (size >= 1) {
      const gap = size > 4 ? 1 : 0;
      for (let i = view.first; i < view.last; i++) {
        const value = stream.values[i];
        if (value === null || value === undefined) continue;
        paintBar(context, stream, value, LABEL + (i - view.first) * size, Math.max(1, size - gap), top, ink);
      }
    } else {
      for (let x = 0; x < area; x++) {
        const from = view.first + Math.floor(x / size);
        const value = farthest(stream, from, Math.max(from + 1, view.first + Math.floor((x + 1) / size)));
        if (value !== null) paintBar(context, stream, value, LABEL + x, 1, top, ink);
      }
    }
  });
  if (chosen !== null && chosen >= view.first && chosen < view.last) {
    context.strokeStyle = ink.fg;
    context.lineWidth = 1;
    context.strokeRect(LABEL + (chosen - view.first) * size - 0.5, 0.5, Math.max(size, 2) + 1, height - 1);
  }
}

interface Props {
  streams: Stream[];
  count: number;
  chosen: number | null;
  choose: (position: number) => void;
}

export function Strips({ streams, count, chosen, choose }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [view, setView] = useState<View>({ first: 0, last: count });
  const [size, setSize] = useState(0);
  const drag = useRef<{ x: number; view: View } | null>(null);
  useEffect(() => setView({ first: 0, last: count }), [count]);
  useEffect(() => {
    const element = canvas.current!;
    const watch = new ResizeObserver(() => setSize(element.clientWidth));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (count > 0) paint(canvas.current!, streams, view, chosen);
  }, [streams, view, chosen, size, dark.value]);
  useEffect(() => {
    // keep the chosen token in sight
    if (chosen === null || (chosen >= view.first && chosen < view.last)) return;
    const half = Math.floor((view.last - view.first) / 2);
    setView(clamp(chosen - half, view.last - view.first));
  }, [chosen]);
  const clamp = (first: number, length: number): View => {
    const start = Math.max(0, Math.min(count - length, first));
    return { first: start, last: start + length };
  };
  const position = (event: MouseEvent): number => {
    const box = canvas.current!.getBoundingClientRect();
    const share = (event.clientX - box.left - LABEL) / (box.width - LABEL);
    return Math.floor(view.first + share * (view.last - view.first));
  };
  const zoom = (event: WheelEvent) => {
    // without a key the wheel scrolls the page, as everywhere
    if (!(event.ctrlKey || event.metaKey || event.shiftKey) || count < 12) return;
    event.preventDefault();
    const at = position(event);
    const length = Math.round((view.last - view.first) * ((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8));
    const bounded = Math.max(10, Math.min(count, length));
    const share = (at - view.first) / (view.last - view.first);
    setView(clamp(Math.round(at - share * bounded), bounded));
  };
  const move = (event: PointerEvent) => {
    if (drag.current) {
      const box = canvas.current!.getBoundingClientRect();
      const { x, view: from } = drag.current;
      const tokens = Math.round(((x - event.clientX) / (box.width - LABEL)) * (from.last - from.first));
      setView(clamp(from.first + tokens, from.last - from.first));
    }
  };
  const release = (event: PointerEvent) => {
    const still = drag.current && Math.abs(event.clientX - drag.current.x) < 4;
    drag.current = null;
    const at = position(event);
    if (still && at >= view.first && at < view.last) choose(at);
  };
  const arrow = (event: KeyboardEvent) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (by === 0) return;
    event.preventDefault();
    event.stopPropagation();
    choose(Math.max(0, Math.min(count - 1, (chosen ?? -1) + by)));
  };
  return (
    <canvas
      ref={canvas}
      class="strips"
      style={{ height: `${streams.length * LANE}px` }}
      tabIndex={0}
      role="slider"
      aria-label={t("strips.label")}
      aria-valuemin={0}
      aria-valuemax={Math.max(0, count - 1)}
      aria-valuenow={chosen ?? 0}
      onWheel={zoom}
      onPointerDown={(event) => {
        drag.current = { x: event.clientX, view };
        canvas.current!.setPointerCapture(event.pointerId);
      }}
      onPointerMove={move}
      onPointerUp={release}
      onDblClick={() => setView({ first: 0, last: count })}
      onKeyDown={arrow}
    />
  );
}
