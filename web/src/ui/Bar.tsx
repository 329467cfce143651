// The bar at the top: screens, language, theme.

import { useState } from "preact/hooks";
import { t, type Key } from "../i18n";
import { route } from "../route";
import { serves, session } from "../session";
import { language, theme, type Theme } from "../settings";
import { Icon, type IconName } from "./Icon";

const SCREENS: { path: string; label: Key; needs: string }[] = [
  { path: "runs", label: "nav.runs", needs: "/runs" },
  { path: "new", label: "nav.new", needs: "/check" },
  { path: "jobs", label: "nav.jobs", needs: "/jobs" },
  { path: "chat", label: "nav.chat", needs: "/chats" },
  { path: "data", label: "nav.data", needs: "/data/preview" },
];
const THEMES: Record<Theme, { icon: IconName; next: Theme; label: Key }> = {
  system: { icon: "system", next: "light", label: "theme.system" },
  light: { icon: "sun", next: "dark", label: "theme.light" },
  dark: { icon: "moon", next: "system", label: "theme.dark" },
};

function shown(path: string): boolean {
  const now = route.value.path[0];
  return now === path || (path === "runs" && (now === "run" || now === "compare"));
}

export function Bar({ help }: { help: () => void }) {
  const [open, setOpen] = useState(false);
  const look = THEMES[theme.value];
  const other = language.value === "en" ? "vi" : "en";
  return (
    <header class="bar">
      <a class="brand" href="#/runs" title={session.value?.folder}>
        <img src="./icon.svg" alt="" width="24" height="24" />
        <span>Luyen studio</span>
      </a>
      <button class="plain menu" aria-expanded={open} aria-controls="screens" onClick={() => setOpen(!open)}>
        {t("nav.menu")}
      </button>
      <nav id="screens" class={open ? "open" : ""} aria-label={t("nav.screens")} onClick={() => setOpen(false)}>
        {SCREENS.filter((screen) => serves(screen.needs)).map((screen) => (
          <a href={`#/${screen.path}`} aria-current={shown(screen.path) ? "page" : undefined}>
            {t(screen.label)}
          </a>
        ))}
      </nav>
      <div class="bar-end">
        {session.value?.read_only ? <span class="tag">{t("nav.readonly")}</span> : null}
        <button
          class="plain"
          lang={other}
          onClick={() => (language.value = other)}
          title={other === "vi" ? "Tiếng Việt" : "English"}
        >
          {other.toUpperCase()}
          <span class="hidden">: {other === "vi" ? "Tiếng Việt" : "English"}</span>
        </button>
        <button class="plain" onClick={() => (theme.value = look.next)} aria-label={t(look.label)} title={t(look.label)}>
          <Icon name={look.icon} />
        </button>
        <button class="plain" onClick={help} aria-label={t("help.title")} title={t("help.title")}>
          ?
        </button>
      </div>
    </header>
  );
}
