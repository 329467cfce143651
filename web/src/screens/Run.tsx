// A run: its name, its state, its screens. One stream of events serves all of them.

import { createContext } from "preact";
import { useContext, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useApi, useEvents, type Answer } from "../api/client";
import type { Overview as OverviewData } from "../api/types";
import { t, type Key } from "../i18n";
import { links } from "../route";
import { serves } from "../session";
import { Progress, RunState } from "../ui/RunState";
import { Empty, Loaded, Notice } from "../ui/State";
import { Export } from "./Export";
import { Faults } from "./Faults";
import { Group } from "./Group";
import { Log } from "./Log";
import { Overview } from "./Overview";
import { Parity } from "./Parity";
import { Plan } from "./Plan";
import { Rewards } from "./Rewards";
import { Rollout } from "./Rollout";
import { Rollouts } from "./Rollouts";
import { Timeline } from "./Timeline";

interface Live {
  run: OverviewData;
  /** Grows with every step that was trained while the page is open. */
  steps: number;
  /** Grows when rollouts were written. */
  rollouts: number;
}

const RunContext = createContext<Live | null>(null);

export function useRun(): Live {
  const live = useContext(RunContext);
  if (live === null) throw new Error("a screen of a run outside of a run");
  return live;
}

const TABS: [string, Key][] = [
  ["", "tab.overview"],
  ["timeline", "tab.timeline"],
  ["rollouts", "tab.rollouts"],
  ["rewards", "tab.rewards"],
  ["parity", "tab.parity"],
  ["faults", "tab.faults"],
  ["plan", "tab.plan"],
  ["log", "tab.log"],
  ["export", "tab.export"],
];
const PARENT: Record<string, string> = { rollout: "rollouts", group: "rollouts" };

function Screen({ rest }: { rest: string[] }) {
  const [screen, split, step, third] = rest;
  switch (screen) {
    case undefined:
      return <Overview />;
    case "timeline":
      return <Timeline />;
    case "rollouts":
      return <Rollouts />;
    case "rollout":
      return <Rollout split={split ?? ""} step={step ?? ""} index={third ?? ""} />;
    case "group":
      return <Group split={split ?? ""} step={step ?? ""} group={third ?? ""} />;
    case "rewards":
      return <Rewards />;
    case "parity":
      return <Parity />;
    case "faults":
      return <Faults />;
    case "plan":
      return <Plan />;
    case "log":
      return <Log />;
    case "export":
      return <Export />;
    default:
      return <Empty title={t("error.noscreen")} />;
  }
}

const PAUSE_MS = 2000;

/** Follows the run by events; what was read before is asked again at most every two seconds. */
function useLive(id: string): { answer: Answer<OverviewData>; live: Live | null; open: boolean } {
  const answer = useApi<OverviewData>(`/runs/${encodeURIComponent(id)}`);
  const [count, setCount] = useState({ steps: 0, rollouts: 0 });
  const [seen, setSeen] = useState<Partial<OverviewData>>({});
  const later = useMemo(() => {
    const due = { steps: 0, rollouts: 0 };
    let waiting = 0;
    const renew = () => {
      waiting = 0;
      setCount((old) => ({ steps: old.steps + due.steps, rollouts: old.rollouts + due.rollouts }));
      due.steps = due.rollouts = 0;
      answer.reload();
    };
    return (what?: "steps" | "rollouts") => {
      if (what) due[what] = 1;
      waiting ||= window.setTimeout(renew, PAUSE_MS);
    };
  }, [answer.reload]);
  const open = useEvents(
    serves("/runs/{}/events") ? `/runs/${encodeURIComponent(id)}/events` : null,
    {
      step: (data) => {
        setSeen((old) => ({ ...old, step: (data as { step: number }).step }));
        later("steps");
      },
      state: (data) => {
        setSeen((old) => ({ ...old, ...(data as Partial<OverviewData>) }));
        later();
      },
      rollouts: () => later("rollouts"),
      validation: () => later("steps"),
    },
    answer.reload,
  );
  const pending = answer.data?.pending === true;
  useEffect(() => {
    if (pending) later();
  }, [answer.data]);
  const live = answer.data ? { run: { ...answer.data, ...seen, id }, ...count } : null;
  return { answer, live, open };
}

/** The screens of a run; on a narrow page the chosen one is scrolled into view. */
function Tabs({ id, now }: { id: string; now: string }) {
  const bar = useRef<HTMLElement>(null);
  useEffect(() => {
    const chosen = bar.current?.querySelector<HTMLElement>("[aria-current]");
    if (bar.current && chosen) bar.current.scrollLeft = chosen.offsetLeft - bar.current.offsetLeft - 16;
  }, [now]);
  return (
    <nav ref={bar} class="tabs" aria-label={t("nav.runscreens")}>
      {TABS.filter(([path]) => path === "" || path === "export" || serves(`/runs/{}/${path}`)).map(([path, label]) => (
        <a href={links.run(id, path)} aria-current={now === path ? "page" : undefined}>
          {t(label)}
        </a>
      ))}
    </nav>
  );
}

export function RunScreens({ id, rest }: { id: string; rest: string[] }) {
  const { answer, live, open } = useLive(id);
  const now = PARENT[rest[0] ?? ""] ?? rest[0] ?? "";
  return (
    <Loaded answer={answer}>
      {() => {
        const { run } = live!;
        return (
          <RunContext.Provider value={live}>
            <div class="stack">
              <div class="run-head">
                <div class="row">
                  <h1>{run.name}</h1>
                  <RunState state={run.state} />
                  <Progress step={run.step} total={run.total_steps} />
                  {open && run.state === "running" ? <span class="live-dot">{t("run.live")}</span> : null}
                </div>
                <div class="dim small">
                  {[run.stage, run.algorithm, run.model].filter(Boolean).join(" · ")} <code>{run.path}</code>
                </div>
              </div>
              <Tabs id={id} now={now} />
              {run.problem || run.damage.length ? (
                <Notice level="bad">
                  <strong>{t("run.damage")}</strong>
                  {run.problem ? <span class="text">{run.problem}</span> : null}
                  {run.damage.filter((one) => one.message !== run.problem).map((one) => (
                    <span class="small text">
                      <code>{one.file}</code> {one.message}
                    </span>
                  ))}
                </Notice>
              ) : null}
              <Screen rest={rest} />
            </div>
          </RunContext.Provider>
        );
      }}
    </Loaded>
  );
}
