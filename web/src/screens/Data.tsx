// Rows of a configuration's data as the trainer would see them: which tokens carry the loss.

import { useState } from "preact/hooks";
import { ApiError, post, useApi } from "../api/client";
import type { DataPreview, Recipe, RowPart } from "../api/types";
import { number, visible } from "../format";
import { named, t } from "../i18n";
import { Section } from "../ui/Copy";
import { Findings } from "../ui/RunState";
import { Empty, Failure, Loading } from "../ui/State";

function Part({ part }: { part: RowPart }) {
  return (
    <div class="stack tight">
      <div class="row between">
        <h3>{named("part", part.name)}</h3>
        <span class="dim small">{t("data.counts", { trained: number(part.learned), all: number(part.length) })}</span>
      </div>
      <div class="tokens boxed">
        {part.stretches.map((stretch) => (
          <span class={stretch.is_learned ? "trained" : "masked"} title={named("who", stretch.who)}>
            {visible(stretch.text).replace(/\n/g, "↵\n")}
          </span>
        ))}
      </div>
      {part.notes.map((note) => (
        <p class="dim small">{note}</p>
      ))}
    </div>
  );
}

function Row({ row, index }: { row: DataPreview["rows"][number]; index: number }) {
  return (
    <article class="card stack tight" data-row>
      <div class="row between">
        <h2>{t("data.row", { index: number(index + 1) })}</h2>
        <span class="dim small text">{row.at}</span>
      </div>
      {row.problems.map((problem) => (
        <p class="bad-text small text">{problem}</p>
      ))}
      {row.parts.map((part) => (
        <Part part={part} />
      ))}
    </article>
  );
}

export function Data() {
  const recipes = useApi<Recipe[] | { recipes: Recipe[] }>("/recipes");
  const list = recipes.data === null ? [] : Array.isArray(recipes.data) ? recipes.data : recipes.data.recipes;
  const [yaml, setYaml] = useState(() => window.sessionStorage.getItem("luyen.draft") ?? "");
  const [limit, setLimit] = useState("8");
  const [split, setSplit] = useState("train");
  const [preview, setPreview] = useState<DataPreview | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const show = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      setPreview(await post<DataPreview>("/data/preview", { yaml, split, limit: Number(limit) }));
    } catch (problem) {
      if (problem instanceof ApiError) setError(problem);
      else throw problem;
    } finally {
      setBusy(false);
    }
  };
  return (
    <div class="stack">
      <h1>{t("nav.data")}</h1>
      <p class="dim">{t("data.what")}</p>
      <form class="card stack tight" onSubmit={show}>
        <div class="field">
          <label for="data-recipe">{t("form.recipe")}</label>
          <select
            id="data-recipe"
            value=""
            onChange={(event) => setYaml(list.find((one) => one.name === event.currentTarget.value)?.yaml ?? yaml)}
          >
            <option value="">{t("form.recipe.choose")}</option>
            {list.map((one) => (
              <option value={one.name}>{one.title ? `${one.name}: ${one.title}` : one.name}</option>
            ))}
          </select>
        </div>
        <textarea aria-label="YAML" rows={8} spellcheck={false} value={yaml} onInput={(event) => setYaml(event.currentTarget.value)} />
        <div class="row ends">
          <div class="field short">
            <label for="data-limit">{t("data.limit")}</label>
            <input id="data-limit" type="number" min="1" max="100" value={limit} onInput={(event) => setLimit(event.currentTarget.value)} />
          </div>
          <div class="field short">
            <label for="data-split">{t("data.split")}</label>
            <select id="data-split" value={split} onChange={(event) => setSplit(event.currentTarget.value)}>
              <option value="train">{t("split.train")}</option>
              <option value="validation">{t("split.validation")}</option>
            </select>
          </div>
          <button class="primary" disabled={busy || !yaml.trim()}>
            {t("data.show")}
          </button>
          <span class="legend small beside-input">
            <i class="trained" /> {t("mask.yes")} <i class="masked" /> {t("mask.no")}
          </span>
        </div>
      </form>
      {error ? <Failure error={error} /> : null}
      {busy ? <Loading /> : null}
      {preview && preview.findings.length ? (
        <Section title={t("overview.findings")}>
          <div class="card">
            <Findings findings={preview.findings} />
          </div>
        </Section>
      ) : null}
      {preview && preview.problems.length ? (
        <Section title={t("data.problems")}>
          <ul class="card">
            {preview.problems.map((problem) => (
              <li class="bad-text small text">
                {problem.at}: {problem.message}
              </li>
            ))}
          </ul>
        </Section>
      ) : null}
      {preview ? (
        preview.rows.length ? (
          preview.rows.map((row, index) => <Row row={row} index={index} />)
        ) : (
          <Empty title={t("data.empty")} />
        )
      ) : null}
    </div>
  );
}
