// A walk through every screen in a real Chromium, over runs that `make_runs.py` trained.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { api, AXE, openBrowser, openPage, PAGE_MS, PYTHON, ROOT, row, RUN_MS, RUNS, runIds, screens, show, startStudio, WORK_MS } from "./studio.mjs";

let studio;
let browser;
let ids;

before(async () => {
  studio = await startStudio(RUNS);
  browser = await openBrowser();
  ids = await runIds(studio);
});

after(async () => {
  await browser?.close();
  await studio?.stop();
});

async function walk(options, steps) {
  const opened = await openPage(browser, studio, options);
  try {
    await steps(opened.page, opened);
    assert.deepEqual(opened.faults, []);
  } finally {
    await opened.close();
  }
}

/** Lists of the page, the tab of a run: what a person must not have to look for beyond an edge. */
function cutOff() {
  const found = [];
  for (const table of document.querySelectorAll("table.runs")) {
    const box = table.parentElement;
    if (box.scrollWidth > box.clientWidth) found.push(`table.${table.className} by ${box.scrollWidth - box.clientWidth} px`);
  }
  const chosen = document.querySelector(".tabs [aria-current]");
  if (chosen) {
    const [one, bar] = [chosen.getBoundingClientRect(), chosen.parentElement.getBoundingClientRect()];
    if (one.left < bar.left - 1 || one.right > bar.right + 1) found.push(`the tab ${chosen.textContent}`);
  }
  return found;
}

async function seriousFaults(page) {
  await page.evaluate(readFileSync(AXE, "utf8"));
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations
    .filter((one) => one.impact === "serious" || one.impact === "critical")
    .map((one) => `${one.id}: ${one.nodes.map((node) => `${node.target} ${node.failureSummary}`).slice(0, 3).join("; ")}`);
}

for (const [language, theme, width] of [
  ["en", "light", 1360],
  ["vi", "dark", 390],
]) {
  test(`every screen has no console error and no serious accessibility fault (${language}, ${theme}, ${width})`, async () => {
    await walk({ language, theme, width }, async (page) => {
      for (const [name, hash] of await screens(studio)) {
        await show(page, hash);
        assert.deepEqual(await seriousFaults(page), [], name);
        const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
        assert.ok(over <= 0, `${name} is ${over} px wider than the screen`);
        const cut = await page.evaluate(cutOff);
        assert.deepEqual(cut, [], `${name} has parts that are cut off`);
      }
    });
  });
}

test("the list shows every run with its state, and finds by text", async () => {
  await walk({}, async (page) => {
    await show(page, "#/runs");
    const names = async () => page.locator("tbody tr strong").allTextContents();
    assert.deepEqual((await names()).sort(), ["broken", "damaged", "hostile", "killed", "quickstart", "tools"]);
    const state = (name) => page.locator("tr", { hasText: name }).locator(".tag").first().textContent();
    assert.equal(await state("tools"), "finished");
    assert.equal(await state("killed"), "killed");
    assert.equal(await state("broken"), "damaged");
    await page.keyboard.press("/");
    await page.keyboard.type("too");
    assert.deepEqual(await names(), ["tools"]);
  });
});

test("a verdict, curves of the run and the time of its phases are on the overview", async () => {
  await walk({}, async (page) => {
    await show(page, `#/run/${ids.quickstart}`);
    await page.waitForSelector(".verdict");
    const { data } = await api(studio, `/runs/${ids.quickstart}`);
    const reward = data.headline.find((head) => head.key === "reward");
    const card = page.locator(".chart-card", { hasText: "Reward" }).first();
    assert.equal(Number(await card.locator(".last").textContent()), Number(reward.last.toPrecision(4)));
    assert.ok((await page.locator(".chart canvas").count()) >= 5);
    assert.ok((await page.locator(".shares li").count()) >= 3);
  });
});

test("curves of a large file, of which the first part was read, are asked for again", async () => {
  await walk({}, async (page) => {
    let asked = 0;
    await page.route("**/series?*", async (route) => {
      asked += 1;
      const response = await route.fetch();
      const json = await response.json();
      await route.fulfill({ response, json: { ...json, is_whole: asked > 1, pending: false } });
    });
    await show(page, `#/run/${ids.quickstart}`);
    await page.waitForResponse((one) => one.url().includes("/series?") && asked > 1);
  });
});

test("a click on a step of a curve opens the rollouts of that step", async () => {
  await walk({}, async (page) => {
    await show(page, `#/run/${ids.quickstart}`);
    const over = page.locator(".chart .u-over").first();
    const box = await over.boundingBox();
    await page.mouse.click(box.x + box.width - 2, box.y + box.height / 2);
    await page.waitForFunction(() => window.location.hash.includes("/rollouts?start=8&end=8"));
  });
});

test("filters, sorting and search of rollouts are in the address and in the rows", async () => {
  await walk({}, async (page) => {
    await show(page, `#/run/${ids.tools}/rollouts?sort=reward&order=desc`);
    await page.waitForSelector(".rollout-row");
    const rewards = await page.locator(".rollout-row td:nth-child(2)").allTextContents();
    assert.ok(rewards.length > 10 && rewards.every((one) => one === "1"));
    await page.fill("#filter-reward_max", "0");
    await page.waitForFunction(() => window.location.hash.includes("reward_max=0"));
    await page.waitForFunction(() => {
      const cells = [...document.querySelectorAll(".rollout-row td:nth-child(2)")];
      return cells.length > 0 && cells.every((cell) => cell.textContent === "0");
    });
    await page.fill("#filter-text", "no rollout says this");
    await page.getByText("No rollout matches").waitFor();
  });
});

test("rows are walked with j and k, opened with Enter, and neighbours with the arrows", async () => {
  await walk({}, async (page) => {
    await show(page, `#/run/${ids.tools}/rollouts?start=2&end=2`);
    await page.waitForSelector(".rollout-row");
    await page.locator("h1").click();
    await page.keyboard.press("j");
    await page.keyboard.press("j");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => /rollout\/train\/2\/1/.test(window.location.hash));
    await page.waitForSelector(".strips");
    await page.keyboard.press("ArrowRight");
    await page.waitForFunction(() => /rollout\/train\/2\/2/.test(window.location.hash));
    await page.keyboard.press("?");
    assert.ok(await page.locator("dialog").isVisible());
  });
});

test("a token, its message and its numbers are chosen together", async () => {
  await walk({}, async (page) => {
    await show(page, `#/run/${ids.tools}/rollouts?tool=calculator&sort=reward&order=desc`);
    await page.locator(".rollout-row").first().locator("td").nth(1).click();
    await page.waitForSelector(".tokens span[data-t]");
    const { hash } = new URL(page.url());
    const [, run, split, step, index] = hash.match(/run\/(.+)\/rollout\/(\w+)\/(\d+)\/(\d+)/);
    const { data } = await api(studio, `/runs/${run}/rollouts/${split}/${step}/${index}`);
    const position = data.tokens.mask.findIndex(Boolean);
    await page.locator(`[data-t="${position}"]`).click();
    assert.equal(await page.locator(".message.chosen").count(), 1);
    const facts = await page.locator(".token-facts").textContent();
    assert.ok(facts.includes(`#${data.tokens.id[position]}`), facts);
    assert.ok(facts.includes(data.tokens.sampler_logprob[position].toFixed(3)), facts);
    assert.ok((await page.locator(".tool-calls li").count()) >= 1);
    assert.equal(await page.locator(".sibling-list li").count(), data.siblings.length);
    await page.locator(".strips").focus();
    await page.keyboard.press("ArrowRight");
    assert.ok((await page.locator(".token-facts").textContent()).includes(`#${data.tokens.id[position + 1]}`));
  });
});

test("two runs are compared: curves, keys that differ, the first difference", async () => {
  await walk({}, async (page) => {
    await show(page, "#/runs");
    for (const name of ["quickstart", "tools"]) await page.getByLabel(`Choose ${name} for a comparison`).check();
    await page.getByRole("button", { name: /Compare/ }).click();
    await page.getByText("Keys that differ").waitFor();
    await page.getByText("actor_rollout_ref.model.path", { exact: true }).waitFor();
    await page.locator(".chart canvas").first().waitFor();
  });
});

test("a damaged run says which file is damaged, and shows the rest", async () => {
  await walk({}, async (page) => {
    await show(page, `#/run/${ids.damaged}`);
    await page.locator(".notice.bad").getByText("metrics.jsonl").first().waitFor();
    await page.locator(".verdict[aria-busy=false]").getByText(/cannot be judged: metrics.jsonl: line \d+/).waitFor();
    await page.locator(".chart canvas").first().waitFor();
  });
});

test("hostile text of a run is shown as text, also 10 MB of it", async () => {
  await walk({}, async (page) => {
    const run = `#/run/${ids.hostile}`;
    const { group } = await row(studio, ids.hostile, 1, 0);
    for (const hash of ["#/runs", run, `${run}/rollouts`, `${run}/group/train/1/${group}`, `${run}/rewards`, `${run}/rollout/train/1/0`, `${run}/rollout/train/1/1`]) {
      await show(page, hash);
      await page.evaluate(() => document.querySelectorAll("main details").forEach((one) => (one.open = true)));
      const found = await page.evaluate(() => ({
        elements: document.querySelectorAll("main img, main script, main [onerror], main a[href^='javascript']").length,
        hidden: /[\u0000\u001b\u202e]/.test(document.querySelector("main").innerText),
        size: document.querySelector("main").innerText.length,
        over: document.documentElement.scrollWidth - window.innerWidth,
        title: document.title,
      }));
      assert.deepEqual([found.elements, found.hidden], [0, false], hash);
      assert.ok(found.size < 500_000, `${hash} shows ${found.size} characters`);
      assert.ok(found.over <= 0, `${hash} is ${found.over} px wider than the screen`);
      assert.ok(!found.title.includes("pwned"));
    }
    await show(page, `${run}/rewards`);
    await page.getByText("Score: 7").first().waitFor({ state: "attached" });
    await page.locator("details", { hasText: "clear" }).locator("summary").first().click();
    await page.getByText("<script>document.title='pwned'</script>").first().waitFor();
  });
});

test("words and numbers change with the language, and the choice stays", async () => {
  await walk({}, async (page) => {
    await show(page, "#/runs");
    await page.getByRole("button", { name: /Tiếng Việt/ }).click();
    assert.equal(await page.locator("h1").textContent(), "Lượt chạy");
    assert.equal(await page.evaluate(() => document.documentElement.lang), "vi");
    assert.equal(await page.evaluate(() => localStorage.getItem("luyen.language")), "vi");
  });
});

test("a run that is deleted while it is shown is gone, and the page goes on", async () => {
  const folder = mkdtempSync(join(tmpdir(), "luyen-deleted-"));
  for (const name of ["quickstart", "killed", "tools"]) cpSync(join(RUNS, "luyen", name), join(folder, name), { recursive: true });
  const other = await startStudio(folder);
  const opened = await openPage(browser, other, { expected: ["404"] });
  try {
    const { page } = opened;
    const shown = await runIds(other);
    await show(page, `#/run/${shown.quickstart}/rollouts`);
    await page.waitForSelector(".rollout-row");
    rmSync(join(folder, "quickstart"), { recursive: true });
    await page.waitForFunction(() => document.querySelector("main .notice.bad"));
    await show(page, "#/runs");
    await page.waitForFunction(() => document.querySelectorAll("tbody tr").length === 2);
    rmSync(join(folder, "killed"), { recursive: true });
    await page.waitForFunction(() => document.querySelectorAll("tbody tr").length === 1);
    await show(page, `#/run/${shown.tools}`);
    await page.locator(".chart canvas").first().waitFor();
    assert.deepEqual(opened.faults, []);
  } finally {
    await opened.close();
    await other.stop();
  }
});

test("an empty folder says how to begin", async () => {
  const empty = await startStudio(mkdtempSync(join(tmpdir(), "luyen-empty-")));
  const opened = await openPage(browser, empty);
  try {
    await opened.page.getByText("luyen train").waitFor();
    assert.deepEqual(opened.faults, []);
  } finally {
    await opened.close();
    await empty.stop();
  }
});

test("a run that does not exist and a studio that was closed are explained", async () => {
  const other = await startStudio(RUNS);
  const opened = await openPage(browser, other, { expected: ["404", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "ERR_EMPTY"] });
  try {
    await show(opened.page, "#/run/nothing-00000000");
    await opened.page.locator(".notice.bad").waitFor();
    await other.stop();
    await opened.page.evaluate(() => (window.location.hash = "#/compare?id=a&id=b"));
    await opened.page.getByText("The studio does not answer").waitFor();
    assert.deepEqual(opened.faults, []);
  } finally {
    await opened.close();
  }
});

test("a run that goes on is followed without a reload", { timeout: 2 * RUN_MS }, async () => {
  const folder = mkdtempSync(join(tmpdir(), "luyen-live-"));
  const words = ["trainer.total_training_steps=6", `trainer.default_local_dir=${folder}`, "trainer.experiment_name=live"];
  const command = ["-m", "luyen", "train", join(ROOT, "recipes/quickstart.yaml"), ...words];
  const training = spawn(PYTHON, command, { cwd: ROOT, stdio: "ignore" });
  const other = await startStudio(folder);
  const opened = await openPage(browser, other);
  try {
    const { page } = opened;
    const row = page.locator("tr", { hasText: "live" });
    await row.getByText("running").waitFor({ timeout: WORK_MS });
    await row.locator("a").first().click();
    const progress = page.locator(".run-head .progress");
    await page.locator(".live-dot").waitFor({ timeout: PAGE_MS });
    const loads = await page.evaluate(() => performance.getEntriesByType("navigation").length);
    await page.waitForFunction(() => /^[3-6] /.test(document.querySelector(".run-head .progress").textContent), null, { timeout: WORK_MS });
    await page.locator(".run-head .tag.good").waitFor({ timeout: WORK_MS });
    assert.equal(await progress.textContent(), "6 / 6");
    assert.equal(await page.evaluate(() => performance.getEntriesByType("navigation").length), loads);
    assert.deepEqual(opened.faults, []);
  } finally {
    training.kill("SIGKILL");
    await opened.close();
    await other.stop();
  }
});
