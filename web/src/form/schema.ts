// The keys of the configuration, flattened from the JSON schema.

export interface SchemaNode {
  $ref?: string;
  $defs?: Record<string, SchemaNode>;
  type?: string | string[];
  title?: string;
  description?: string;
  default?: unknown;
  enum?: unknown[];
  const?: unknown;
  anyOf?: SchemaNode[];
  oneOf?: SchemaNode[];
  allOf?: SchemaNode[];
  properties?: Record<string, SchemaNode>;
  items?: SchemaNode;
  minimum?: number;
  maximum?: number;
}

export type Kind = "boolean" | "integer" | "number" | "text" | "choice" | "any";

export interface ConfigKey {
  key: string;
  path: string[];
  block: string;
  help: string;
  default: unknown;
  kind: Kind;
  choices: string[];
  nullable: boolean;
}

function resolve(node: SchemaNode, root: SchemaNode): SchemaNode {
  if (!node.$ref) return node;
  const name = node.$ref.split("/").pop()!;
  const { $ref: _, ...rest } = node;
  return { ...(root.$defs?.[name] ?? {}), ...rest };
}

function branches(node: SchemaNode, root: SchemaNode): SchemaNode[] {
  const several = node.anyOf ?? node.oneOf ?? node.allOf;
  return several ? several.map((one) => resolve(one, root)).flatMap((one) => branches(one, root)) : [node];
}

function typesOf(nodes: SchemaNode[]): Set<string> {
  return new Set(nodes.flatMap((node) => (node.type === undefined ? [] : [node.type].flat())));
}

function kindOf(nodes: SchemaNode[]): { kind: Kind; choices: string[]; nullable: boolean } {
  const types = typesOf(nodes);
  const nullable = types.delete("null");
  const choices = nodes.flatMap((node) => (node.enum ?? (node.const !== undefined ? [node.const] : [])).map(String));
  const only = types.size === 1 ? [...types][0] : null;
  const whole = nodes.every((node) => node.type === "null" || node.enum || node.const !== undefined);
  if (choices.length && whole) return { kind: "choice", choices, nullable };
  if (only === "boolean" || only === "integer" || only === "number") return { kind: only, choices, nullable };
  if (only === "string") return { kind: "text", choices, nullable };
  return { kind: "any", choices, nullable };
}

/** Every leaf of the schema, in its order. */
export function keysOf(root: SchemaNode): ConfigKey[] {
  const found: ConfigKey[] = [];
  const walk = (node: SchemaNode, path: string[], depth: number) => {
    const whole = resolve(node, root);
    const nodes = branches(whole, root);
    const object = nodes.find((one) => one.properties && Object.keys(one.properties).length);
    if (object && depth < 8) {
      for (const [name, child] of Object.entries(object.properties!)) walk(child, [...path, name], depth + 1);
      return;
    }
    found.push({
      key: path.join("."),
      path,
      block: path[0]!,
      help: whole.description ?? "",
      default: whole.default,
      ...kindOf(nodes),
    });
  };
  for (const [name, child] of Object.entries(root.properties ?? {})) walk(child, [name], 1);
  return found;
}

/** Keys whose name or documentation holds every word; matches of the name come first. */
export function search(keys: ConfigKey[], text: string): ConfigKey[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const named: ConfigKey[] = [];
  const told: ConfigKey[] = [];
  for (const one of keys) {
    const name = one.key.toLowerCase();
    const whole = `${name} ${one.help.toLowerCase()}`;
    if (words.every((word) => name.includes(word))) named.push(one);
    else if (words.every((word) => whole.includes(word))) told.push(one);
  }
  return [...named, ...told];
}
