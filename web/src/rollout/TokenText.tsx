// The tokens of a rollout as text, each with the colour of the chosen stream.

import { memo } from "preact/compat";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { visible } from "../format";
import { t } from "../i18n";
import { bucket, type Stream } from "./streams";

const CHUNK = 200;
/** More tokens than this are shown a part at a time. */
const WINDOW = 6000;

interface ChunkProps {
  from: number;
  to: number;
  texts: string[];
  stream: Stream;
}

/** A token as text; a line end is shown and obeyed. */
function written(text: string): string {
  return visible(text).replace(/\n/g, "↵\n");
}

const Chunk = memo(({ from, to, texts, stream }: ChunkProps) => {
  const spans = [];
  for (let i = from; i < to; i++) {
    spans.push(
      <span data-t={i} class={bucket(stream, i)}>
        {written(texts[i]!)}
      </span>,
    );
  }
  return <span class="chunk">{spans}</span>;
});

interface Props {
  texts: string[];
  stream: Stream;
  chosen: number | null;
  range: [number, number] | null;
  choose: (position: number) => void;
}

function position(event: Event): number | null {
  const mark = (event.target as HTMLElement).dataset.t;
  return mark === undefined ? null : Number(mark);
}

export function TokenText({ texts, stream, chosen, range, choose }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [start, setStart] = useState(0);
  const end = Math.min(texts.length, start + WINDOW);
  useEffect(() => {
    if (chosen !== null && (chosen < start || chosen >= end)) {
      setStart(Math.max(0, Math.min(texts.length - WINDOW, chosen - WINDOW / 2)));
    }
  }, [chosen]);
  useEffect(() => {
    // classes of single tokens change here, so that thousands of others are not rendered again
    const element = box.current!;
    element.querySelectorAll(".in-range").forEach((one) => one.classList.remove("in-range"));
    element.querySelectorAll(".chosen").forEach((one) => one.classList.remove("chosen"));
    if (range) {
      for (let i = Math.max(range[0], start); i < Math.min(range[1], end); i++) {
        element.querySelector(`[data-t="${i}"]`)?.classList.add("in-range");
      }
    }
    if (chosen === null) return;
    const token = element.querySelector<HTMLElement>(`[data-t="${chosen}"]`);
    if (!token) return;
    token.classList.add("chosen");
    const top = token.offsetTop - element.offsetTop;
    if (top < element.scrollTop || top > element.scrollTop + element.clientHeight - 30) {
      element.scrollTop = top - element.clientHeight / 3;
    }
  }, [chosen, range, start, stream]);
  const chunks = useMemo(() => {
    const made = [];
    for (let from = start; from < end; from += CHUNK) {
      made.push(<Chunk key={from} from={from} to={Math.min(end, from + CHUNK)} texts={texts} stream={stream} />);
    }
    return made;
  }, [texts, stream, start, end]);
  return (
    <div
      ref={box}
      class="tokens"
      tabIndex={0}
      role="region"
      aria-label={t("rollout.tokens")}
      onClick={(event) => {
        const at = position(event);
        if (at !== null) choose(at);
      }}
    >
      {start > 0 ? (
        <button onClick={() => setStart(Math.max(0, start - WINDOW / 2))}>{t("rollout.earlier")}</button>
      ) : null}
      {chunks}
      {end < texts.length ? (
        <button onClick={() => setStart(Math.min(texts.length - WINDOW, start + WINDOW / 2))}>{t("rollout.later")}</button>
      ) : null}
    </div>
  );
}
