// Records in the built page which sources it was built from: the digest that
// tests/architecture/test_web_page.py computes again without npm.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const page = "../src/luyen/web/page";
const roots = ["index.html", "package.json", "package-lock.json", "public", "src", "tsconfig.json", "vite.config.ts"];

function files(path) {
  if (!statSync(path).isDirectory()) return [path];
  return readdirSync(path).flatMap((name) => files(join(path, name)));
}

function digest(paths) {
  const whole = createHash("sha256");
  for (const path of paths.sort()) {
    const one = createHash("sha256").update(readFileSync(path)).digest("hex");
    whole.update(`${one} ${path.split("\\").join("/")}\n`);
  }
  return whole.digest("hex");
}

const built = readdirSync(page).filter((name) => name !== "build.json");
const stamp = {
  sources: digest(roots.flatMap(files)),
  files: Object.fromEntries(
    built.sort().map((name) => [name, createHash("sha256").update(readFileSync(join(page, name))).digest("hex")]),
  ),
};
writeFileSync(join(page, "build.json"), `${JSON.stringify(stamp, null, 2)}\n`);
