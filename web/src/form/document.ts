// The YAML of a new run as a document: fields change it in place, comments stay.

import { isCollection, parseDocument, stringify, type Document } from "yaml";

export interface Parsed {
  document: Document;
  problem: string | null;
}

export function parse(text: string): Parsed {
  const document = parseDocument(text);
  const first = document.errors[0];
  return { document, problem: first ? first.message : null };
}

/** The value of a key, or undefined where the file does not set it. */
export function valueAt(parsed: Parsed, path: string[]): unknown {
  if (parsed.problem !== null || !isCollection(parsed.document.contents)) return undefined;
  const node = parsed.document.getIn(path);
  return isCollection(node) ? node.toJSON() : node;
}

/** The text with the key set, or taken out where the value is undefined. */
export function withValue(text: string, path: string[], value: unknown): string {
  const { document, problem } = parse(text);
  if (problem !== null) return text;
  if (value === undefined) {
    document.deleteIn(path);
    for (let length = path.length - 1; length > 0; length--) {
      const above = document.getIn(path.slice(0, length));
      if (isCollection(above) && above.items.length === 0) document.deleteIn(path.slice(0, length));
    }
  } else {
    for (let length = 1; length < path.length; length++) {
      const above = path.slice(0, length);
      if (!isCollection(document.getIn(above))) document.setIn(above, document.createNode({}));
    }
    document.setIn(path, document.createNode(value));
  }
  return isCollection(document.contents) && document.contents.items.length === 0 ? "" : document.toString();
}

/** What a person typed, as YAML reads it: `1e-6` is a number, `[a, b]` a list, the rest text. */
export function typed(text: string, asText: boolean): unknown {
  if (text === "") return undefined;
  if (asText) return text;
  const { document, problem } = parse(text);
  return problem === null ? document.toJS() : text;
}

/** A value as it would be written in a field. */
export function shownValue(value: unknown): string {
  if (value === undefined) return "";
  if (value === null) return "null";
  if (typeof value === "string") return value;
  if (typeof value === "object") return JSON.stringify(value);
  return stringify(value).trim();
}
