// Attempts, resumptions, notes, and the chain of digests.

import { useApi } from "../api/client";
import type { Faults as Data } from "../api/types";
import { number, plain, pretty, when } from "../format";
import { t } from "../i18n";
import { links } from "../route";
import { Section } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { JsonLink } from "../ui/LongText";
import { Loaded, Notice } from "../ui/State";
import { VirtualTable } from "../ui/VirtualTable";
import { useRun } from "./Run";

function Resumptions({ data }: { data: Data }) {
  return (
    <div class="card flush wide" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th>{t("word.time")}</th>
            <th class="num">{t("word.step")}</th>
            <th>{t("faults.changed")}</th>
          </tr>
        </thead>
        <tbody>
          {data.resumptions.map((one) => (
            <tr>
              <td>{when(one.time)}</td>
              <td class="num">{number(one.step)}</td>
              <td>
                <code class="text">{one.changed ? plain(one.changed) : t("faults.nothing")}</code>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Digests({ run, data }: { run: string; data: Data }) {
  const rows = [...data.digests].reverse();
  return (
    <div class="card flush">
      <VirtualTable
        rows={rows}
        rowHeight={37}
        columns={3}
        label={t("faults.digests")}
        head={
          <thead>
            <tr>
              <th class="num">{t("word.step")}</th>
              <th>{t("faults.chain")}</th>
              <th>{t("word.state")}</th>
            </tr>
          </thead>
        }
        row={(one) => (
          <tr key={one.step} data-row style={{ height: "37px" }}>
            <td class="num">
              <a href={links.step(run, one.step)}>{number(one.step)}</a>
            </td>
            <td class="chain" title={one.chain}>
              <code>{one.chain}</code>
            </td>
            <td>
              {one.ok === false ? (
                <span class="tag bad">
                  <Icon name="warning" />
                  {t("faults.brokenchain")}
                </span>
              ) : one.ok ? (
                <span class="tag good">
                  <Icon name="check" />
                  {t("faults.intact")}
                </span>
              ) : (
                <span class="dim">–</span>
              )}
            </td>
          </tr>
        )}
      />
    </div>
  );
}

export function Faults() {
  const { run, steps } = useRun();
  const path = `/runs/${encodeURIComponent(run.id)}/faults`;
  const answer = useApi<Data>(path, steps);
  return (
    <Loaded answer={answer}>
      {(data) => (
        <div class="stack">
          <div class="row between">
            <p>{t("faults.attempts", { count: number(data.attempts) })}</p>
            <JsonLink path={path} />
          </div>
          {data.broken.length ? (
            <Notice level="bad">
              <strong>{t("faults.broken")}</strong>
              {data.broken.map((one) => (
                <pre>{pretty(one)}</pre>
              ))}
            </Notice>
          ) : null}
          <Section title={t("faults.resumptions")}>
            {data.resumptions.length ? <Resumptions data={data} /> : <p class="dim">{t("faults.noresumptions")}</p>}
          </Section>
          <Section title={t("faults.notes")}>
            {data.notes.length ? (
              <div class="card">
                <dl class="facts">
                  {data.notes.map((one) => (
                    <div>
                      <dt>{when(one.time)}</dt>
                      <dd class="text">{one.note}</dd>
                    </div>
                  ))}
                </dl>
              </div>
            ) : (
              <p class="dim">{t("faults.nonotes")}</p>
            )}
          </Section>
          <Section title={t("faults.digests")}>
            {data.digests.length ? <Digests run={run.id} data={data} /> : <p class="dim">{t("faults.nodigests")}</p>}
          </Section>
        </div>
      )}
    </Loaded>
  );
}
