// Pictures of every screen in both languages and both themes, and at phone width, into web/shots.
//
// `node tests/browser/shots.mjs docs` writes the one picture of each screen that the documentation shows.

import { cpSync, mkdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openBrowser, openPage, ROOT, RUNS, screens, show, startStudio, WORK_MS } from "./studio.mjs";

const isForDocs = process.argv[2] === "docs";
const folder = isForDocs ? join(ROOT, "docs/images/studio") : join(ROOT, "web/shots");
const looks = isForDocs
  ? [["en", "light", 1200]]
  : [
      ["en", "light", 1360],
      ["en", "dark", 1360],
      ["vi", "light", 1360],
      ["vi", "dark", 1360],
      ["vi", "light", 390],
      ["en", "dark", 390],
    ];
// Left out of the documentation: states of screens that are there already.
const left = new Set(isForDocs ? ["damaged", "broken", "killed"] : []);

/** What a person does on a screen before its picture is taken; the slow ones once. */
const prepare = {
  new: async (page) => {
    await page.selectOption("#recipe", "quickstart");
    await page.locator(".outcome .good-text").waitFor({ timeout: WORK_MS });
    await page.fill("[id='key-actor_rollout_ref.rollout.n']", "0");
    await page.locator(".key-field.bad").waitFor({ timeout: WORK_MS });
  },
  data: async (page) => {
    await page.selectOption("#data-recipe", "kto");
    await page.locator("form button.primary").click();
    await page.locator("article").first().waitFor({ timeout: WORK_MS });
  },
  chat: async (page) => {
    await page.fill("#temperature", "0");
    await page.fill("textarea", "923*336=");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector(".turn .dim.small"), null, { timeout: WORK_MS });
  },
};
/** Paths of this machine read as those of any checkout. */
const withoutPaths = (page) =>
  page.evaluate((root) => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) walker.currentNode.data = walker.currentNode.data.replaceAll(root, "/home/me/luyen");
    for (const field of document.querySelectorAll("textarea")) field.value = field.value.replaceAll(root, "/home/me/luyen");
    window.scrollTo(0, 0);
  }, ROOT);
const slow = new Set(["data", "chat", "new"]);

mkdirSync(folder, { recursive: true });
let runs = RUNS;
if (isForDocs) {
  // a folder whose name says nothing of this machine
  runs = join(tmpdir(), "runs");
  rmSync(runs, { recursive: true, force: true });
  cpSync(RUNS, runs, { recursive: true });
}
const studio = await startStudio(runs);
const browser = await openBrowser();
let count = 0;
for (const [number, [language, theme, width]] of looks.entries()) {
  const { page, close } = await openPage(browser, studio, { language, theme, width });
  for (const [name, hash] of await screens(studio)) {
    if (left.has(name)) continue;
    await show(page, hash);
    // the doctor reads in the background
    await page.waitForFunction(() => !document.querySelector(".verdict[aria-busy=true]"), null, { timeout: WORK_MS });
    if (prepare[name] && (number === 0 || !slow.has(name))) await prepare[name](page);
    if (isForDocs) await withoutPaths(page);
    await page.evaluate(() => window.scrollTo(0, 0));
    await page.waitForTimeout(400);
    const path = join(folder, isForDocs ? `${name}.jpg` : `${name}-${language}-${theme}-${width}.png`);
    await page.screenshot(isForDocs ? { path, type: "jpeg", quality: 70, fullPage: name === "rollout" } : { path, fullPage: true });
    count += 1;
  }
  await close();
}
await browser.close();
await studio.stop();
console.log(`${count} pictures in ${folder}`);
