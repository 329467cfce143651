// A run from the form to a chat with its checkpoint, in a real Chromium.

import assert from "node:assert/strict";
import { cpSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { api, openBrowser, openPage, RUN_MS, RUNS, runIds, show, startStudio, WORK_MS } from "./studio.mjs";

const STEPS = 4;
let studio;
let browser;
let opened;
let acts;

before(async () => {
  const folder = mkdtempSync(join(tmpdir(), "luyen-runs-"));
  for (const name of ["quickstart", "tools"]) {
    cpSync(join(RUNS, "luyen", name), join(folder, "luyen", name), { recursive: true });
  }
  studio = await startStudio(folder);
  browser = await openBrowser();
  opened = await openPage(browser, studio);
  acts = (await api(studio, "/jobs")).status === 200;
});

after(async () => {
  await browser?.close();
  await studio?.stop();
});

test("a wrong value is found beside its field as one types", { timeout: 2 * RUN_MS }, async () => {
  const { page, faults } = opened;
  await show(page, "#/new");
  await page.selectOption("#recipe", "quickstart");
  await page.getByText("No error: this configuration can be trained.").waitFor({ timeout: WORK_MS });
  await page.fill("[data-search]", "rollout.n");
  const field = page.locator("[id='key-actor_rollout_ref.rollout.n']");
  await field.fill("0");
  await page.locator(".key-field.bad", { hasText: "actor_rollout_ref.rollout.n" }).waitFor();
  await field.fill("");
  await page.getByText("No error: this configuration can be trained.").waitFor({ timeout: WORK_MS });
  assert.deepEqual(faults, []);
});

test("a run is started from the form, finishes, and its rollouts are opened", { timeout: 2 * RUN_MS }, async (context) => {
  if (!acts) return context.skip("this server starts no runs");
  const { page, faults } = opened;
  await show(page, "#/new?key=total_training_steps");
  await page.fill("[id='key-trainer.total_training_steps']", String(STEPS));
  await page.waitForFunction((steps) => document.querySelector("textarea").value.includes(`total_training_steps: ${steps}`), STEPS);
  await page.getByText("No error: this configuration can be trained.").waitFor({ timeout: WORK_MS });
  await page.fill("#job-name", "from-the-form");
  await page.getByRole("button", { name: "Start" }).click();
  await page.waitForFunction(() => window.location.hash.startsWith("#/jobs/"));
  await page.locator("tr", { hasText: "from-the-form" }).locator(".tag.good").waitFor({ timeout: RUN_MS });
  const ids = await runIds(studio);
  const name = Object.keys(ids).find((one) => one !== "quickstart" && one !== "tools");
  await show(page, `#/run/${ids[name]}`);
  await page.getByText(`${STEPS} / ${STEPS}`).first().waitFor();
  for (const [link, reward] of [
    ["Best", "1"],
    ["Worst", "0"],
  ]) {
    await show(page, `#/run/${ids[name]}/rollouts`);
    await page.getByRole("link", { name: link }).click();
    await page.waitForFunction((wanted) => document.querySelector(".rollout-row td:nth-child(2)")?.textContent === wanted, reward);
    await page.locator(".rollout-row a").first().click();
    await page.locator(".chips dd").first().waitFor();
    assert.equal(await page.locator(".chips dd").first().textContent(), reward);
  }
  await show(page, `#/compare?id=${ids.quickstart}&id=${ids[name]}`);
  await page.getByText("trainer.total_training_steps", { exact: true }).waitFor();
  assert.deepEqual(faults, []);
});

test("a checkpoint answers in a chat, token by token", { timeout: 2 * RUN_MS }, async (context) => {
  if ((await api(studio, "/chats/sources")).status !== 200) return context.skip("this server has no chat");
  const { page, faults } = opened;
  await show(page, "#/chat");
  await page.fill("#max-tokens", "8");
  await page.fill("textarea", "12+34=");
  await page.keyboard.press("Enter");
  await page.getByText(/tokens in/).waitFor({ timeout: WORK_MS });
  assert.deepEqual(faults, []);
});

test("rows of a recipe are previewed with their mask", { timeout: 2 * RUN_MS }, async (context) => {
  if (!acts) return context.skip("this server previews no data");
  const { page, faults } = opened;
  await show(page, "#/data");
  await page.selectOption("#data-recipe", "kto");
  await page.getByRole("button", { name: "Show" }).click();
  await page.locator("article").first().waitFor({ timeout: WORK_MS });
  assert.equal(await page.locator("article").count(), 8);
  assert.ok((await page.locator("article .trained").count()) >= 8);
  assert.deepEqual(faults, []);
});

test("the tools of the run answer in a chat", { timeout: 2 * RUN_MS }, async () => {
  const { page, faults } = opened;
  const ids = await runIds(studio);
  await show(page, `#/chat?run=${ids.tools}`);
  assert.ok(await page.locator("#chat-tools").isChecked());
  await page.fill("#temperature", "0");
  await page.fill("textarea", "923*336=");
  await page.keyboard.press("Enter");
  await page.getByText(/tokens in/).waitFor({ timeout: WORK_MS });
  const call = page.locator(".message.tool").first();
  assert.match(await call.textContent(), /calculator\(/);
  assert.deepEqual(faults, []);
});

test("a replay on request fills the strips that the files lack", { timeout: 2 * RUN_MS }, async () => {
  const { page, faults } = opened;
  const { quickstart } = await runIds(studio);
  const place = `#/run/${quickstart}/rollout/train/6/0?token=25`;
  await show(page, place);
  await page.getByRole("button", { name: "Replay this step" }).click();
  await page.waitForFunction(() => window.location.hash.startsWith("#/jobs/"));
  await page.locator("tr.chosen .tag.good").waitFor({ timeout: WORK_MS });
  await show(page, place);
  await page.getByText("came out as recorded").waitFor();
  assert.match(await page.locator(".token-facts").textContent(), /Entropy/);
  assert.deepEqual(faults, []);
});

test("a checkpoint is served and talked to at its address", { timeout: 2 * RUN_MS }, async () => {
  const { page, faults } = opened;
  const { quickstart } = await runIds(studio);
  await show(page, `#/run/${quickstart}/export`);
  await page.fill("#serve-port", "0");
  await page.getByText("luyen serve").first().waitFor();
  await page.getByRole("button", { name: "Serve", exact: true }).click();
  await page.waitForFunction(() => window.location.hash.startsWith("#/jobs/"));
  const row = page.locator("tr.chosen");
  await row.getByText(/127\.0\.0\.1:\d+\/v1/).waitFor({ timeout: WORK_MS });
  await row.getByRole("link", { name: "Chat" }).click();
  await page.fill("#max-tokens", "8");
  await page.fill("textarea", "12+34=");
  await page.keyboard.press("Enter");
  await page.getByText(/tokens in/).waitFor({ timeout: WORK_MS });
  await show(page, "#/jobs");
  await page.locator("tr", { hasText: "serve" }).getByRole("button", { name: "Stop" }).click();
  await page.locator("tr", { hasText: "serve" }).locator(".tag.warn").waitFor({ timeout: WORK_MS });
  assert.deepEqual(faults, []);
});
