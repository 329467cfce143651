// What a screen shows while it has nothing else: loading, empty, an error with its fix.

import type { ComponentChildren } from "preact";
import type { Answer, ApiError } from "../api/client";
import { t } from "../i18n";
import { Icon } from "./Icon";

export function Loading() {
  return (
    <div class="state" role="status">
      <span class="spinner" aria-hidden="true" />
      <span>{t("state.loading")}</span>
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="state">
      <strong>{title}</strong>
      {children ? <div class="dim small">{children}</div> : null}
    </div>
  );
}

function explained(error: ApiError): string {
  if (error.status === 0) return t("error.unreachable");
  if (error.status === 401) return t("error.token");
  return error.body.message;
}

export function Failure({ error, retry }: { error: ApiError; retry?: () => void }) {
  const { field, fix } = error.body;
  return (
    <div class="notice bad" role="alert">
      <Icon name="warning" />
      <div class="stack tight">
        <strong>{explained(error)}</strong>
        {field ? <code>{field}</code> : null}
        {fix ? <span>{fix}</span> : null}
        {error.status === 0 ? <span class="small">{error.body.message}</span> : null}
        {retry ? (
          <div>
            <button onClick={retry}>{t("action.retry")}</button>
          </div>
        ) : null}
      </div>
    </div>
  );
}

interface Props<T> {
  answer: Answer<T>;
  children: (data: T) => ComponentChildren;
}

/** Children once there is data; an error of a later refresh stands above the data it could not renew. */
export function Loaded<T>({ answer, children }: Props<T>) {
  const { data, error, reload } = answer;
  if (data === null) return error ? <Failure error={error} retry={reload} /> : <Loading />;
  return (
    <>
      {error ? <Failure error={error} retry={reload} /> : null}
      {children(data)}
    </>
  );
}

/** Something that a person should know before reading on. */
export function Notice(props: { level?: "bad" | "warn" | "info" | "good"; children: ComponentChildren }) {
  const level = props.level ?? "info";
  return (
    <div class={`notice ${level}`}>
      <Icon name={level === "info" ? "info" : level === "good" ? "check" : "warning"} />
      <div class="stack tight">{props.children}</div>
    </div>
  );
}
