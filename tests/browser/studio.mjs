// A studio over a folder and a browser in front of it.

import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const require = createRequire(join(ROOT, "web/package.json"));
const { chromium } = require("playwright-core");
export const AXE = require.resolve("axe-core/axe.min.js");
export const RUNS = process.env.LUYEN_WEB_RUNS ?? join(ROOT, "build/web-runs");
export const PYTHON = process.env.LUYEN_PYTHON ?? join(ROOT, ".venv/bin/python");

/** Longest waits: for the page, for what a process is started for, for a run. `PATIENCE=10` makes them longer. */
const PATIENCE = Number(process.env.PATIENCE ?? 1) * 1000;
export const PAGE_MS = 20 * PATIENCE;
export const WORK_MS = 120 * PATIENCE;
export const RUN_MS = 300 * PATIENCE;

function browserPath() {
  const known = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
  const found = known.find((path) => path && existsSync(path));
  if (!found) throw new Error("no Chromium found: set CHROMIUM to its path");
  return found;
}

/** Starts `luyen studio`; `url` holds the token. */
export async function startStudio(folder, ...options) {
  const child = spawn(PYTHON, ["-m", "luyen", "studio", folder, "--port", "0", "--no-open", ...options], {
    cwd: ROOT,
    stdio: ["ignore", "pipe", "pipe"],
  });
  let text = "";
  const url = await new Promise((resolve, reject) => {
    const look = (data) => {
      text += data;
      const found = text.match(/http:\/\/\S+token=\S+/);
      if (found) resolve(found[0]);
    };
    child.stdout.on("data", look);
    child.stderr.on("data", look);
    child.on("exit", (code) => reject(new Error(`luyen studio ended with ${code}:\n${text}`)));
  });
  const stopped = new Promise((resolve) => child.on("exit", resolve));
  return { url, child, output: () => text, stop: () => (child.kill("SIGTERM"), stopped) };
}

export async function openBrowser() {
  return chromium.launch({ executablePath: browserPath(), args: ["--no-sandbox", "--disable-gpu"] });
}

/**
 * A page that notes what must not happen: errors in the console, exceptions, requests elsewhere.
 *
 * `expected` are answers that a test provokes; Chromium prints every 4xx as an error.
 */
export async function openPage(browser, studio, { language = "en", theme = "light", width = 1360, expected = [] } = {}) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, locale: "en-GB" });
  await context.addInitScript(
    ([words, look]) => {
      localStorage.setItem("luyen.language", words);
      localStorage.setItem("luyen.theme", look);
    },
    [language, theme],
  );
  context.setDefaultTimeout(PAGE_MS);
  const page = await context.newPage();
  const faults = [];
  const origin = new URL(studio.url).origin;
  page.on("console", (message) => {
    const text = `${message.text()} ${message.location().url}`;
    if (message.type() === "error" && !expected.some((one) => text.includes(one))) faults.push(text);
  });
  page.on("pageerror", (error) => faults.push(String(error.stack)));
  page.on("request", (request) => {
    if (!request.url().startsWith(origin)) faults.push(`a request to ${request.url()}`);
  });
  await page.goto(studio.url, { waitUntil: "load" });
  return { page, faults, origin, close: () => context.close() };
}

/** Goes to a screen by its hash and waits until nothing loads any more. */
export async function show(page, hash) {
  await page.evaluate((next) => (window.location.hash = next), hash);
  await page.waitForFunction(() => document.querySelector("main h1, main h2, main .state, main .notice"));
  const still = () => !document.querySelector(".spinner");
  await page.waitForFunction(still, null, { timeout: PAGE_MS }).catch((error) => {
    throw new Error(`${hash} goes on loading`, { cause: error });
  });
}

export async function api(studio, path) {
  const { origin, searchParams } = new URL(studio.url);
  const answer = await fetch(`${origin}/api/v1${path}`, {
    headers: { Authorization: `Bearer ${searchParams.get("token")}` },
  });
  return { status: answer.status, data: await answer.json() };
}

/** id of each run by its name. */
export async function runIds(studio) {
  const { data } = await api(studio, "/runs");
  return Object.fromEntries(data.runs.map((run) => [run.name, run.id]));
}

/** Paths that the server answers, without the names of their parameters. */
export async function servedPaths(studio) {
  const { data } = await api(studio, "/openapi.json");
  return new Set(Object.keys(data.paths).map((path) => path.replace("/api/v1", "").replace(/\{[^}]*\}/g, "{}")));
}

/** A row of the table of rollouts; its index is built in the background. */
export async function row(studio, id, step, index) {
  for (;;) {
    const { data } = await api(studio, `/runs/${id}/rollouts?start=${step}&end=${step}&limit=${index + 1}`);
    if (data.rows[index]) return data.rows[index];
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
}

/** Every screen that the studio serves as (name, hash), for the runs of `make_runs.py`. */
export async function screens(studio) {
  const ids = await runIds(studio);
  const served = await servedPaths(studio);
  const { group } = await row(studio, ids.tools, 6, 3);
  const run = `#/run/${ids.tools}`;
  const all = [
    ["runs", "#/runs"],
    ["overview", run],
    ["timeline", `${run}/timeline`],
    ["rollouts", `${run}/rollouts`],
    ["rollout", `${run}/rollout/train/6/3?token=20`],
    ["group", `${run}/group/train/6/${group}`],
    ["rewards", `${run}/rewards`],
    ["parity", `${run}/parity`],
    ["faults", `${run}/faults`],
    ["plan", `${run}/plan`],
    ["log", `${run}/log`],
    ["export", `${run}/export`],
    ["compare", `#/compare?id=${ids.quickstart}&id=${ids.killed}`],
    ["damaged", `#/run/${ids.damaged}`],
    ["broken", `#/run/${ids.broken}`],
    ["killed", `#/run/${ids.killed}`],
    ["new", "#/new"],
    ["jobs", "#/jobs"],
    ["chat", "#/chat"],
    ["data", "#/data"],
  ];
  const needs = { new: "/check", jobs: "/jobs", chat: "/chats", data: "/data/preview" };
  return all.filter(([name]) => !(name in needs) || served.has(needs[name]));
}
