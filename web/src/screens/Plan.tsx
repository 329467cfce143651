// The configuration as it was resolved: every key, its value, and where the value comes from.

import { useMemo, useState } from "preact/hooks";
import { useApi } from "../api/client";
import type { Plan as Data } from "../api/types";
import { plain } from "../format";
import { t } from "../i18n";
import { told } from "../i18n/told";
import { link } from "../route";
import { serves } from "../session";
import { CopyButton, Section } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { JsonLink } from "../ui/LongText";
import { Memory } from "../ui/Memory";
import { Findings } from "../ui/RunState";
import { Empty, Loaded } from "../ui/State";
import { useRun } from "./Run";

type PlanKey = Data["keys"][number];

function isDefault(one: PlanKey): boolean {
  return plain(one.value) === plain(one.default);
}

function Keys({ data }: { data: Data }) {
  const [text, setText] = useState("");
  const [all, setAll] = useState(false);
  const rows = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/);
    return data.keys.filter((one) => {
      const whole = `${one.key} ${plain(one.value)} ${one.help ?? ""}`.toLowerCase();
      return (all || text || !isDefault(one)) && words.every((word) => whole.includes(word));
    });
  }, [data, text, all]);
  return (
    <Section
      title={t("plan.keys")}
      aside={
        <div class="row toolbar">
          <label class="row toolbar">
            <input type="checkbox" checked={all} onChange={(event) => setAll(event.currentTarget.checked)} /> {t("plan.all")}
          </label>
          <div class="search">
            <Icon name="search" />
            <input
              data-search
              type="search"
              aria-label={t("plan.search")}
              placeholder={t("plan.search")}
              value={text}
              onInput={(event) => setText(event.currentTarget.value)}
            />
          </div>
        </div>
      }
    >
      {rows.length === 0 ? (
        <Empty title={t("plan.nokey")} />
      ) : (
        <div class="card flush wide" tabIndex={0}>
          <table class="keys-table">
            <thead>
              <tr>
                <th>{t("plan.key")}</th>
                <th>{t("plan.value")}</th>
                <th>{t("plan.source")}</th>
                <th>{t("plan.default")}</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((one) => (
                <tr data-row key={one.key}>
                  <td>
                    <code>{one.key}</code>
                    {one.help ? <div class="dim small">{one.help}</div> : null}
                  </td>
                  <td data-label={t("plan.value")}>
                    <code class="text">{plain(one.value)}</code>
                  </td>
                  <td class="dim text" data-label={t("plan.source")}>
                    {one.source ? told(one.source) : t("plan.default")}
                  </td>
                  {isDefault(one) ? (
                    <td />
                  ) : (
                    <td class="dim" data-label={t("plan.default")}>
                      <code class="text">{plain(one.default)}</code>
                    </td>
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Section>
  );
}

export function Plan() {
  const { run } = useRun();
  const path = `/runs/${encodeURIComponent(run.id)}/plan`;
  const answer = useApi<Data>(path);
  return (
    <Loaded answer={answer}>
      {(data) => (
        <div class="stack">
          <div class="row between">
            {serves("/check") ? (
              <a class="button" href={link(["new"], { run: run.id })}>
                <Icon name="plus" />
                {t("plan.copy")}
              </a>
            ) : (
              <span />
            )}
            <JsonLink path={path} />
          </div>
          {data.memory.length ? (
            <Section title={t("plan.memory")}>
              <div class="card">
                <Memory bars={data.memory} />
              </div>
            </Section>
          ) : null}
          {data.findings.length ? (
            <Section title={t("overview.findings")}>
              <div class="card">
                <Findings findings={data.findings} />
              </div>
            </Section>
          ) : null}
          <Keys data={data} />
          {data.yaml ? (
            <details class="card">
              <summary>YAML</summary>
              <div class="padded">
                <CopyButton text={data.yaml} label={t("action.copy")} />
                <pre class="padded">{data.yaml}</pre>
              </div>
            </details>
          ) : null}
        </div>
      )}
    </Loaded>
  );
}
