"""What a key or a rule means, in words."""

from typing import Any, TypeAlias, cast

from luyen.base.errors import UserError
from luyen.base.suggest import near_names
from luyen.config import verl_keys
from luyen.config.choices import OPEN, choices_of
from luyen.config.fields import FieldInfo, all_blocks, all_fields, children
from luyen.config.rules.all import RULES
from luyen.config.search import search
from luyen.config.structure import STRUCTURE

Items: TypeAlias = tuple[Any, ...]


def explain(name: str) -> str:
    """Text about a key, a block, a rule's id, or a key of verl; what fits the words otherwise."""
    if name in all_fields():
        return _explain_key(all_fields()[name])
    blocks = [path for path in all_blocks() if path == name or path.endswith(f".{name}")]
    if len(blocks) == 1:
        return _explain_block(blocks[0])
    if name.upper() in RULES:
        rule = RULES[name.upper()]
        return f"{rule.id} ({rule.severity})\n  {rule.doc}"
    if name.upper() in STRUCTURE:
        return f"{name.upper()}\n  {STRUCTURE[name.upper()]}"
    if name in verl_keys.MOOT:
        accepted, reason = verl_keys.MOOT[name]
        only = " or ".join(repr(value) for value in accepted)
        return f"{name}\n  A key of verl, accepted at {only}: {reason}."
    if name in verl_keys.NOTED:
        return f"{name}\n  A key of verl, accepted with a note: {verl_keys.NOTED[name][1]}."
    if name in verl_keys.RENAMED:
        return f"{name}\n  Another name for {verl_keys.RENAMED[name]}, and read as it."
    instead = verl_keys.nearest(name)
    if instead is not None:
        return f"{name}\n  A key of verl that Luyen does not have. Nearest here: {instead}."
    ending = [path for path in all_fields() if path.endswith(f".{name}")]
    if ending:
        return "\n\n".join(_explain_key(all_fields()[path]) for path in ending)
    found = None if "." in name else search(name)  # with a dot it is a mistyped key
    if found is not None:
        return found
    raise UserError("KEY", name, "no key, block or rule of this name", _near_keys(name))


def _near_keys(name: str) -> str:
    tails = {path: path.rpartition(".")[2] for path in all_fields()}
    near = near_names(name.rpartition(".")[2], set(tails.values()))
    listed = [f"`{path}`" for path, tail in tails.items() if tail in near]
    return "did you mean " + " or ".join(listed) + "?" if listed else "`luyen schema` lists all"


def show_value(value: Any) -> str:
    """A value as YAML would write it on one line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return "[" + ", ".join(show_value(item) for item in cast(Items, value)) + "]"
        case _:
            return str(value)


def show_default(info: FieldInfo) -> str:
    """What is in force when nothing is written, as YAML would write it or in a word."""
    if info.required:
        return "required"
    return "derived" if info.derived else show_value(info.default)


def _explain_key(info: FieldInfo) -> str:
    lines = [
        info.path,
        f"  {info.doc}",
        f"  type      {info.kind}",
        f"  default   {show_default(info)}{f': {info.derived}' if info.derived else ''}",
    ]
    choices = choices_of(info)
    if choices:
        more = ", or a name that a plugin registers" if info.path in OPEN else ""
        lines.append(f"  choices   {', '.join(choices)}{more}")
    if info.awaits:
        lines.append(f"  not built nothing reads it yet; it belongs to {info.awaits}")
    if info.only:
        lines.append(f"  only      {show_value(info.default)}: {info.only}")
    rules = [rule for rule in RULES.values() if _mentions(rule.doc, info.path)]
    lines += [f"  rule {rule.id}  {rule.doc}" for rule in rules]
    return "\n".join(lines)


def _mentions(doc: str, path: str) -> bool:
    name = path.rpartition(".")[2]
    return any(f"`{form}`" in doc for form in (name, path, ".".join(path.split(".")[-2:])))


def _explain_block(path: str) -> str:
    head = f"{path}\n  {all_blocks()[path]}" if path else all_blocks()[path]
    inner = [f"{path}.{name}" if path else name for name in children(path)]
    lines = [
        f"  {p.rpartition('.')[2]:32s} {all_blocks().get(p) or all_fields()[p].doc}" for p in inner
    ]
    return "\n".join([head, *lines])
