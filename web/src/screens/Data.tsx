// Rows of a configuration's data as the trainer would see them: which tokens carry the loss.

import { useState } from "preact/hooks";
import { ApiError, post, useApi } from "../api/client";
import type { DataPreview, Recipe } from "../api/types";
import { number, visible } from "../format";
import { named, t } from "../i18n";
import { Section } from "../ui/Copy";
import { LongText } from "../ui/LongText";
import { Findings } from "../ui/RunState";
import { Empty, Failure, Loading } from "../ui/State";

function Row({ row, index }: { row: DataPreview["rows"][number]; index: number }) {
  const trained = row.tokens.mask.filter(Boolean).length;
  return (
    <article class="card stack tight" data-row>
      <div class="row between">
        <h2>{t("data.row", { index: number(index + 1) })}</h2>
        <span class="dim small">{t("data.counts", { trained: number(trained), all: number(row.tokens.text.length) })}</span>
      </div>
      {row.problems.map((problem) => (
        <p class="bad-text small text">{problem}</p>
      ))}
      <div class="columns">
        <ol class="conversation">
          {row.messages.map((message) => (
            <li class={`message ${message.role}`}>
              <strong class="small">{named("role", message.role)}</strong>
              {message.content ? <LongText text={message.content} /> : null}
            </li>
          ))}
        </ol>
        <div class="tokens">
          {row.tokens.text.slice(0, 2000).map((text, i) => (
            <span class={row.tokens.mask[i] ? "trained" : "masked"}>{visible(text).replace(/\n/g, "↵\n")}</span>
          ))}
        </div>
      </div>
    </article>
  );
}

export function Data() {
  const recipes = useApi<Recipe[] | { recipes: Recipe[] }>("/recipes");
  const list = recipes.data === null ? [] : Array.isArray(recipes.data) ? recipes.data : recipes.data.recipes;
  const [yaml, setYaml] = useState(() => window.sessionStorage.getItem("luyen.draft") ?? "");
  const [limit, setLimit] = useState("8");
  const [preview, setPreview] = useState<DataPreview | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const show = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      setPreview(await post<DataPreview>("/data/preview", { yaml, limit: Number(limit) }));
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
        <div class="row">
          <div class="field short">
            <label for="data-limit">{t("data.limit")}</label>
            <input id="data-limit" type="number" min="1" max="100" value={limit} onInput={(event) => setLimit(event.currentTarget.value)} />
          </div>
          <button class="primary" disabled={busy || !yaml.trim()}>
            {t("data.show")}
          </button>
          <span class="legend small">
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
