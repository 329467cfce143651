// Memory of a device as a bar of parts, against its capacity.

import type { MemoryBar } from "../api/types";
import { bytes, percent } from "../format";
import { named, t } from "../i18n";
import { fills } from "./fills";

export function Memory({ bars }: { bars: MemoryBar[] }) {
  return (
    <div class="stack">
      {bars.map((bar) => (
        <Bar bar={bar} />
      ))}
    </div>
  );
}

function Bar({ bar }: { bar: MemoryBar }) {
  const whole = Math.max(bar.capacity ?? 0, bar.total) || 1;
  const fill = fills(bar.parts.map((part) => part.name));
  const over = bar.capacity !== null && bar.total > bar.capacity;
  return (
    <div class="stack tight">
      <div class="row between small">
        <strong>{named("phase", bar.device)}</strong>
        <span class={over ? "bad-text" : ""}>
          {bar.capacity !== null
            ? t("memory.of", { used: bytes(bar.total), capacity: bytes(bar.capacity), share: percent(bar.total / bar.capacity) })
            : bytes(bar.total)}
        </span>
      </div>
      <div class="share-bar" aria-hidden="true">
        {bar.parts.map((part, i) => (
          <span class={`fill${fill[i]}`} style={{ width: `${(part.bytes / whole) * 100}%` }} title={named("memory", part.name)} />
        ))}
      </div>
      <ul class="shares">
        {bar.parts.map((part, i) => (
          <li>
            <i class={`fill${fill[i]}`} aria-hidden="true" />
            <span>{named("memory", part.name)}</span>
            <span class="num">{bytes(part.bytes)}</span>
            <span class="num dim">{percent(part.bytes / whole)}</span>
          </li>
        ))}
      </ul>
      {over ? <p class="bad-text small">{t("memory.over")}</p> : null}
    </div>
  );
}
