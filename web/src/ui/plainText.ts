// Every text and every label that is drawn shows control characters and direction marks as what
// they are: names, faults and texts of a run may hold any.

import { Fragment, options } from "preact";
import type { VNode } from "preact";
import { visible } from "../format";

const LABELS = ["title", "aria-label", "label", "placeholder", "alt"];

function shown(child: unknown): unknown {
  if (typeof child === "string") return visible(child);
  return Array.isArray(child) ? child.map(shown) : child;
}

const before = options.vnode;
options.vnode = (node: VNode) => {
  if (typeof node.type === "string" || node.type === Fragment) {
    const props = node.props as Record<string, unknown>;
    if (props.children !== undefined) props.children = shown(props.children);
    for (const name of LABELS) if (typeof props[name] === "string") props[name] = visible(props[name]);
  }
  before?.(node);
};
