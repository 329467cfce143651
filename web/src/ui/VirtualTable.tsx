// A table of any length: only the rows on the screen exist.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface Props<T> {
  rows: T[];
  rowHeight: number;
  head: ComponentChildren;
  columns: number;
  label: string;
  row: (row: T, index: number) => ComponentChildren;
  /** Called when the end of the rows comes near. */
  more?: () => void;
}

const AROUND = 12;

export function VirtualTable<T>({ rows, rowHeight, head, columns, label, row, more }: Props<T>) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  useEffect(() => {
    const element = box.current!;
    const look = () => setView({ top: element.scrollTop, height: element.clientHeight });
    look();
    const watch = new ResizeObserver(look);
    watch.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      watch.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);
  const first = Math.max(0, Math.floor(view.top / rowHeight) - AROUND);
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / rowHeight) + AROUND);
  useEffect(() => {
    if (last >= rows.length - AROUND) more?.();
  }, [last, rows.length]);
  return (
    <div class="virtual" ref={box} tabIndex={0} role="region" aria-label={label}>
      <table aria-rowcount={rows.length}>
        {head}
        <tbody>
          {first > 0 ? (
            <tr aria-hidden="true" style={{ height: `${first * rowHeight}px` }}>
              <td colSpan={columns} />
            </tr>
          ) : null}
          {rows.slice(first, last).map((one, i) => row(one, first + i))}
          {last < rows.length ? (
            <tr aria-hidden="true" style={{ height: `${(rows.length - last) * rowHeight}px` }}>
              <td colSpan={columns} />
            </tr>
          ) : null}
        </tbody>
      </table>
    </div>
  );
}
