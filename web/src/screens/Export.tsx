// What can be done with a run's checkpoint: resume, export, serve, each with its command.

import { useState } from "preact/hooks";
import { ApiError, post } from "../api/client";
import type { Job } from "../api/types";
import { named, t } from "../i18n";
import { go, link } from "../route";
import { acting, serves } from "../session";
import { Command, Section } from "../ui/Copy";
import { Failure } from "../ui/State";
import { useRun } from "./Run";

/** Runs an action of the server and goes to the job it made. */
export function useJob() {
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const start = async (path: string, body: unknown) => {
    setBusy(true);
    try {
      const job = await post<Job>(path, body);
      go(link(["jobs", job.id]));
    } catch (problem) {
      if (problem instanceof ApiError) setError(problem);
      else throw problem;
    } finally {
      setBusy(false);
    }
  };
  return { error, busy, start };
}

function ExportForm({ id, step }: { id: string; step: number | null }) {
  const [output, setOutput] = useState("");
  const [from, setFrom] = useState("");
  const { error, busy, start } = useJob();
  const send = (event: Event) => {
    event.preventDefault();
    void start("/exports", { run_id: id, step: from === "" ? null : Number(from), output });
  };
  return (
    <form class="stack tight" onSubmit={send}>
      <div class="filter-grid">
        <div class="field">
          <label for="export-step">{t("export.step")}</label>
          <input
            id="export-step"
            type="number"
            min="0"
            placeholder={step === null ? "" : String(step)}
            value={from}
            onInput={(event) => setFrom(event.currentTarget.value)}
          />
        </div>
        <div class="field wide-field">
          <label for="export-output">{t("export.output")}</label>
          <input id="export-output" required value={output} placeholder="exported/" onInput={(event) => setOutput(event.currentTarget.value)} />
        </div>
        <button class="primary" disabled={busy || !output}>
          {t("export.start")}
        </button>
      </div>
      {error ? <Failure error={error} /> : null}
    </form>
  );
}

/** Starts a server of a checkpoint as a job; the command that does the same stands below it. */
function ServeForm({ id, step, command }: { id: string; step: number | null; command: string | null }) {
  const [from, setFrom] = useState("");
  const [port, setPort] = useState("8000");
  const { error, busy, start } = useJob();
  const send = (event: Event) => {
    event.preventDefault();
    void start("/servers", { run_id: id, step: from === "" ? null : Number(from), port: Number(port) });
  };
  return (
    <form class="stack tight" onSubmit={send}>
      <p class="dim small">{t("export.serve.what")}</p>
      <div class="filter-grid">
        <div class="field">
          <label for="serve-step">{t("export.step")}</label>
          <input
            id="serve-step"
            type="number"
            min="0"
            placeholder={step === null ? "" : String(step)}
            value={from}
            onInput={(event) => setFrom(event.currentTarget.value)}
          />
        </div>
        <div class="field">
          <label for="serve-port">{t("export.port")}</label>
          <input id="serve-port" type="number" min="0" max="65535" required value={port} onInput={(event) => setPort(event.currentTarget.value)} />
        </div>
        <button class="primary" disabled={busy}>
          {t("export.serve")}
        </button>
      </div>
      {error ? <Failure error={error} /> : null}
      {command ? <Command text={`${command}${from ? `/checkpoints/step_${from.padStart(6, "0")}` : ""} --port ${port || "0"}`} /> : null}
    </form>
  );
}

export function Export() {
  const { run } = useRun();
  const { error, busy, start } = useJob();
  const shown = ["resume", "export", "serve", "eval", "report", "reproduce", "replay"].filter((name) => run.commands[name]);
  const resumable = run.state === "killed" || run.state === "interrupted" || run.state === "finished";
  return (
    <div class="stack">
      {acting.value ? (
        <>
          <Section title={t("export.resume")}>
            <div class="card stack tight">
              <p class="dim small">{t("export.resume.what")}</p>
              <div class="row">
                <button
                  class="primary"
                  disabled={busy || !resumable}
                  onClick={() => void start(`/runs/${encodeURIComponent(run.id)}/resume`, {})}
                >
                  {t("export.resume")}
                </button>
                {serves("/chats") ? (
                  <a class="button" href={link(["chat"], { run: run.id })}>
                    {t("nav.chat")}
                  </a>
                ) : null}
              </div>
              {error ? <Failure error={error} /> : null}
            </div>
          </Section>
          {serves("/exports") ? (
            <Section title={t("export.title")}>
              <div class="card">
                <ExportForm id={run.id} step={run.step} />
              </div>
            </Section>
          ) : null}
          {serves("/servers") ? (
            <Section title={t("export.serve.title")}>
              <div class="card">
                <ServeForm id={run.id} step={run.step} command={run.commands.serve ?? null} />
              </div>
            </Section>
          ) : null}
        </>
      ) : null}
      <Section title={t("overview.commands")}>
        {shown.length ? (
          <div class="card stack">
            {shown.map((name) => (
              <div class="stack tight">
                <h3>{named("command", name)}</h3>
                <Command text={run.commands[name]!} />
              </div>
            ))}
          </div>
        ) : (
          <p class="dim">{t("export.none")}</p>
        )}
      </Section>
    </div>
  );
}
