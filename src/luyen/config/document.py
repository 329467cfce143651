"""`docs/config.md` and the JSON schema, made from the models so that they cannot drift."""

from collections.abc import Iterator
from typing import Any

from luyen.config import verl_keys
from luyen.config.explain import show_value
from luyen.config.fields import FieldInfo, all_blocks, all_fields
from luyen.config.rules.all import RULES
from luyen.config.schema.run import RunConfig
from luyen.config.structure import STRUCTURE


def json_schema() -> dict[str, Any]:
    """A JSON schema for editors: completion, types and meanings while typing YAML."""
    schema = RunConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_page() -> str:
    """The reference page: every key, every rule, every refusal."""
    return "\n".join([*_head(), *_keys(), *_refusals(), *_rules(), *_verl()]) + "\n"


def _head() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "Made by `luyen schema --markdown` from the models in `luyen.config.schema`; do not edit."
    yield ""
    yield "A configuration is YAML in six blocks. Later files win over earlier ones, `key=value`"
    yield "on the command line over all. `defaults: [base.yaml]` includes other files; `${...}`"
    yield "names another key or an environment variable (`${oc.env:HOME}`)."
    yield ""


def _keys() -> Iterator[str]:
    groups: dict[str, list[FieldInfo]] = {}
    for info in all_fields().values():
        groups.setdefault(info.path.rpartition(".")[0], []).append(info)
    for path, fields in groups.items():
        yield f"## `{path}`"
        yield ""
        yield all_blocks()[path]
        yield ""
        yield "| key | default | type | meaning |"
        yield "|---|---|---|---|"
        for info in fields:
            default = "required" if info.required else f"`{show_value(info.default)}`"
            name = info.path.rpartition(".")[2]
            yield f"| `{name}` | {default} | {_cell(info.kind)} | {_cell(info.doc)} |"
        yield ""


def _refusals() -> Iterator[str]:
    yield "## Values that are refused"
    yield ""
    yield "A key whose reader is not built yet is refused at any value but its default (C009),"
    yield "and a key with a single possible value at any other (C010)."
    yield ""
    yield "| key | accepted | why |"
    yield "|---|---|---|"
    for info in all_fields().values():
        if info.awaits or info.only:
            why = info.only or f"not built yet: {info.awaits}"
            yield f"| `{info.path}` | `{show_value(info.default)}` | {_cell(why)} |"
    yield ""


def _rules() -> Iterator[str]:
    yield "## Rules"
    yield ""
    yield "| id | severity | what it demands |"
    yield "|---|---|---|"
    for name, doc in STRUCTURE.items():
        yield f"| {name} | error | {_cell(doc)} |"
    for rule in RULES.values():
        yield f"| {rule.id} | {rule.severity} | {_cell(rule.doc)} |"
    yield ""


def _verl() -> Iterator[str]:
    yield "## Coming from verl"
    yield ""
    yield "Keys named as in verl mean the same. Those below exist only there."
    yield ""
    yield "| verl key | here |"
    yield "|---|---|"
    for path, (accepted, reason) in verl_keys.MOOT.items():
        only = " or ".join(f"`{show_value(value)}`" for value in accepted)
        yield f"| `{path}` | accepted at {only}: {reason} |"
    for path, instead in verl_keys.NEAREST.items():
        yield f"| `{path}` | {instead} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
