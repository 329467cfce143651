// Seconds until each screen of a large run is painted, in a real Chromium:
//
//   LUYEN_WEB_RUNS=/tmp/scale node tests/browser/scale.mjs
//
// over the folder that benchmarks/studio_scale.py makes. `first` is the browser's first contentful
// paint of the address opened anew, `whole` the time until nothing loads any more. Of that, `server`
// is the time in which at least one answer was waited for, and `page` the processor time of the tab.

import { api, openBrowser, PAGE_MS, RUNS, runIds, startStudio } from "./studio.mjs";

const studio = await startStudio(RUNS);
const browser = await openBrowser();
const ids = await runIds(studio);
const run = `#/run/${ids.run}`;
const screens = ["#/runs", run, `${run}/timeline`, `${run}/rollouts`, `${run}/rollouts?reward_min=0.5`];
screens.push(`${run}/rollout/train/9000/3`, `${run}/rewards`, `${run}/parity`, `${run}/faults`, `${run}/plan`);
screens.push(`#/run/${ids.points}`, `#/compare?id=${ids.run}&id=${ids.run0}`, "#/new", "#/jobs");

// The index of rollouts is built in the background; what is measured is a studio that has it.
const { data } = await api(studio, `/runs/${ids.run}/rollouts`);
let seen = data;
while (process.env.WAIT !== "no" && seen.indexed_steps < seen.total_steps) {
  await new Promise((resolve) => setTimeout(resolve, 2000));
  seen = (await api(studio, `/runs/${ids.run}/rollouts`)).data;
}

const context = await browser.newContext({ viewport: { width: 1360, height: 900 } });
const page = await context.newPage();
const tools = await context.newCDPSession(page);
await tools.send("Performance.enable", { timeDomain: "threadTicks" });
const processor = async () => {
  const { metrics } = await tools.send("Performance.getMetrics");
  return metrics.find((one) => one.name === "TaskDuration").value;
};
/** Seconds in which an answer of the API was waited for. */
const waited = () =>
  page.evaluate(() => {
    const all = performance.getEntriesByType("resource").filter((one) => one.name.includes("/api/") && !one.name.endsWith("/events"));
    let [sum, end] = [0, 0];
    for (const one of all.sort((a, b) => a.startTime - b.startTime)) {
      sum += Math.max(0, one.responseEnd - Math.max(one.startTime, end));
      end = Math.max(end, one.responseEnd);
    }
    return sum / 1000;
  });
await page.goto(studio.url, { waitUntil: "load" });
for (const hash of screens) {
  await page.goto("about:blank");
  const before = await processor();
  const begun = performance.now();
  await page.goto(new URL(studio.url).origin + "/" + hash, { waitUntil: "load" });
  await page.waitForFunction(() => document.querySelector("main h1, main h2, main .state"));
  await page.waitForFunction(() => !document.querySelector(".spinner"), null, { timeout: PAGE_MS });
  const whole = (performance.now() - begun) / 1000;
  const first = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN);
  const [server, own] = [await waited(), (await processor()) - before];
  const parts = { first: first / 1000, whole, server, page: own };
  const told = Object.entries(parts).map(([name, value]) => `${name} ${value.toFixed(2)} s`);
  console.log(`${told.join("  ")}  ${hash}`);
}
await browser.close();
await studio.stop();
