// The shell: bar, routes, keyboard.

import { useEffect, useState } from "preact/hooks";
import { t, type Key } from "./i18n";
import { focusSearch, moveRow, useKeys } from "./keys";
import { route } from "./route";
import { openSession, session, sessionError } from "./session";
import { language } from "./settings";
import { Bar } from "./ui/Bar";
import { Help } from "./ui/Help";
import { Empty, Failure, Loading } from "./ui/State";
import { RunScreens } from "./screens/Run";
import { Runs } from "./screens/Runs";
import { Compare } from "./screens/Compare";
import { NewRun } from "./screens/NewRun";
import { Jobs } from "./screens/Jobs";
import { Chat } from "./screens/Chat";
import { Data } from "./screens/Data";

const SCREENS: Record<string, Key> = {
  runs: "nav.runs",
  compare: "compare.title",
  new: "nav.new",
  jobs: "nav.jobs",
  chat: "nav.chat",
  data: "nav.data",
};

function Screen() {
  const { path } = route.value;
  switch (path[0]) {
    case "runs":
      return <Runs />;
    case "compare":
      return <Compare />;
    case "run":
      return path[1] ? <RunScreens key={path[1]} id={path[1]} rest={path.slice(2)} /> : <Runs />;
    case "new":
      return <NewRun />;
    case "jobs":
      return <Jobs chosen={path[1] ?? null} />;
    case "chat":
      return <Chat />;
    case "data":
      return <Data />;
    default:
      return (
        <Empty title={t("error.noscreen")}>
          <a href="#/runs">{t("nav.runs")}</a>
        </Empty>
      );
  }
}

export function App() {
  const [help, setHelp] = useState(false);
  useEffect(() => void openSession(), []);
  useEffect(() => {
    const { path } = route.value;
    const screen = SCREENS[path[0] ?? ""];
    const words = path[0] === "run" ? [path[2], path[1]] : [screen ? t(screen) : ""];
    document.title = [...words.filter(Boolean), "Luyen studio"].join(" · ");
  }, [route.value.path.join("/"), language.value]);
  useEffect(() => {
    window.scrollTo(0, 0);
  }, [route.value.path.join("/")]);
  useKeys((key) => {
    if (key === "/") return focusSearch();
    if (key === "j") return moveRow(1);
    if (key === "k") return moveRow(-1);
    if (key === "?") setHelp(true);
    return key === "?";
  });
  const failed = sessionError.value;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => skip(event)}>
        {t("nav.skip")}
      </a>
      <Bar help={() => setHelp(true)} />
      <main id="main" tabIndex={-1}>
        {failed ? <Failure error={failed} retry={() => void openSession()} /> : session.value ? <Screen /> : <Loading />}
      </main>
      {help ? <Help close={() => setHelp(false)} /> : null}
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}
