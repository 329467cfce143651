// Jobs that the studio started: queue, progress, logs, stop and cancel.

import { useEffect, useState } from "preact/hooks";
import { ApiError, post, useApi, useEvents, withQuery } from "../api/client";
import type { Job, Jobs as Data } from "../api/types";
import { ago, number, when } from "../format";
import { named, t } from "../i18n";
import { link, links } from "../route";
import { serves } from "../session";
import { Command } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { Progress } from "../ui/RunState";
import { Empty, Failure, Loaded } from "../ui/State";
import { LogLines } from "./Log";

const TONES: Record<Job["state"], string> = { queued: "", running: "live", finished: "good", failed: "bad", stopped: "warn" };
const REFRESH_MS = 3000;

/** Asks again every few seconds while something is queued or running and the tab is seen. */
function useRefresh(active: boolean, reload: () => void): void {
  useEffect(() => {
    if (!active) return;
    const timer = window.setInterval(() => {
      if (!document.hidden) reload();
    }, REFRESH_MS);
    return () => window.clearInterval(timer);
  }, [active, reload]);
}

function Actions({ job, done }: { job: Job; done: () => void }) {
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const act = async (what: "stop" | "cancel") => {
    setBusy(true);
    try {
      await post(`/jobs/${encodeURIComponent(job.id)}/${what}`, {});
      done();
    } catch (problem) {
      if (problem instanceof ApiError) setError(problem);
      else throw problem;
    } finally {
      setBusy(false);
    }
  };
  return (
    <div class="row">
      {job.state === "running" ? (
        <button disabled={busy} onClick={() => void act("stop")} title={t("jobs.stop.what")}>
          <Icon name="stop" /> {t("jobs.stop")}
        </button>
      ) : null}
      {job.state === "queued" ? (
        <button disabled={busy} onClick={() => void act("cancel")}>
          <Icon name="close" /> {t("jobs.cancel")}
        </button>
      ) : null}
      {error ? <Failure error={error} /> : null}
    </div>
  );
}

function Details({ job }: { job: Job }) {
  const answer = useApi<{ lines: string[] }>(withQuery(`/jobs/${encodeURIComponent(job.id)}/log`, { tail: 400 }));
  useRefresh(job.state === "running" || job.state === "queued", answer.reload);
  return (
    <div class="stack tight">
      <h2>{job.name}</h2>
      {job.error ? <p class="bad-text text">{job.error}</p> : null}
      <Command text={job.command} />
      <LogLines answer={answer} />
    </div>
  );
}

function Row({ job, reload, chosen }: { job: Job; reload: () => void; chosen: boolean }) {
  return (
    <tr data-row class={chosen ? "chosen" : ""}>
      <td>
        <a href={link(["jobs", job.id])}>
          <strong>{job.name}</strong>
        </a>
        {job.run_id ? (
          <div class="small">
            <a href={links.run(job.run_id)}>{t("jobs.run")}</a>
          </div>
        ) : null}
        {job.url ? (
          <div class="small row">
            <code>{job.url}</code>
            <a href={link(["chat"], { url: job.url })}>{t("nav.chat")}</a>
          </div>
        ) : null}
        {job.error ? <div class="bad-text small text">{job.error}</div> : null}
      </td>
      <td>
        <span class={`tag ${TONES[job.state] ?? ""}`}>{named("job", job.state)}</span>
      </td>
      <td>
        {job.is_server ? null : <Progress step={job.step} total={job.total_steps} />}
      </td>
      <td class="dim" title={when(job.created)}>
        {ago(job.created)}
      </td>
      <td>
        <Actions job={job} done={reload} />
      </td>
    </tr>
  );
}

export function Jobs({ chosen }: { chosen: string | null }) {
  const answer = useApi<Data>("/jobs");
  const jobs = answer.data?.jobs ?? [];
  useEvents(serves("/events") ? "/events" : null, { runs: answer.reload });
  useRefresh(
    jobs.some((job) => job.state === "running" || job.state === "queued"),
    answer.reload,
  );
  const open = jobs.find((job) => job.id === chosen);
  return (
    <div class="stack">
      <div class="row between">
        <div>
          <h1>{t("nav.jobs")}</h1>
          {answer.data ? <p class="dim small">{t("jobs.limit", { count: number(answer.data.running_limit) })}</p> : null}
        </div>
        <a class="button primary" href="#/new">
          <Icon name="plus" /> {t("nav.new")}
        </a>
      </div>
      <Loaded answer={answer}>
        {(data) =>
          data.jobs.length === 0 ? (
            <Empty title={t("jobs.empty")}>
              <a href="#/new">{t("nav.new")}</a>
            </Empty>
          ) : (
            <div class="card flush wide" tabIndex={0}>
              <table>
                <thead>
                  <tr>
                    <th>{t("jobs.job")}</th>
                    <th>{t("word.state")}</th>
                    <th>{t("word.step")}</th>
                    <th>{t("jobs.created")}</th>
                    <th>
                      <span class="hidden">{t("jobs.actions")}</span>
                    </th>
                  </tr>
                </thead>
                <tbody>
                  {data.jobs.map((job) => (
                    <Row key={job.id} job={job} reload={answer.reload} chosen={job.id === chosen} />
                  ))}
                </tbody>
              </table>
            </div>
          )
        }
      </Loaded>
      {open ? <Details key={open.id} job={open} /> : null}
    </div>
  );
}
