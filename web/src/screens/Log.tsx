// The last lines of what a run printed.

import { useEffect, useRef, useState } from "preact/hooks";
import { useApi, withQuery, type Answer } from "../api/client";
import { visible } from "../format";
import { t } from "../i18n";
import { JsonLink } from "../ui/LongText";
import { Empty, Loaded } from "../ui/State";
import { useRun } from "./Run";

const SIZES = [200, 1000, 5000];

interface Lines {
  lines: string[];
  source?: string;
}

export function LogLines({ answer }: { answer: Answer<Lines> }) {
  const box = useRef<HTMLPreElement>(null);
  useEffect(() => {
    // stays at the end while lines are added, and where a person scrolled to otherwise
    const element = box.current;
    if (element && element.scrollHeight - element.scrollTop - element.clientHeight < 200) element.scrollTop = element.scrollHeight;
  }, [answer.data]);
  useEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [answer.data === null]);
  return (
    <Loaded answer={answer}>
      {(data) =>
        data.lines.length === 0 ? (
          <Empty title={t("log.empty")}>{data.source === "notes" ? <p>{t("log.elsewhere")}</p> : null}</Empty>
        ) : (
          <pre ref={box} class="card log" tabIndex={0} aria-label={t("tab.log")}>
            {data.lines.map(visible).join("\n")}
          </pre>
        )
      }
    </Loaded>
  );
}

export function Log() {
  const { run, steps } = useRun();
  const [tail, setTail] = useState(SIZES[0]!);
  const path = withQuery(`/runs/${encodeURIComponent(run.id)}/log`, { tail });
  const answer = useApi<Lines>(path, steps);
  return (
    <div class="stack">
      <div class="row between">
        <div class="row">
          <label for="tail">{t("log.tail")}</label>
          <select id="tail" class="auto" value={tail} onChange={(event) => setTail(Number(event.currentTarget.value))}>
            {SIZES.map((size) => (
              <option value={size}>{size}</option>
            ))}
          </select>
          <button onClick={answer.reload}>{t("action.reload")}</button>
        </div>
        <JsonLink path={path} />
      </div>
      <LogLines answer={answer} />
    </div>
  );
}
