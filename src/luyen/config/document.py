"""`docs/config.md` and the JSON schema, made from the models so that they cannot drift."""

from collections.abc import Iterator
from typing import Any

from luyen.config import verl_keys
from luyen.config.aliases import STAGES
from luyen.config.explain import show_default, show_value
from luyen.config.fields import FieldInfo, all_blocks, all_fields
from luyen.config.foreign_keys import FOREIGN
from luyen.config.rules.all import RULES
from luyen.config.schema.run import RunConfig
from luyen.config.structure import MILDER, STRUCTURE


def json_schema() -> dict[str, Any]:
    """A JSON schema for editors: completion, types and meanings while typing YAML."""
    schema = RunConfig.model_json_schema()
    for block in (schema, *schema["$defs"].values()):
        for declared in block.get("properties", {}).values():
            if "x-derived" in declared:
                _leave_open(declared)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _leave_open(declared: dict[str, Any]) -> None:
    """Null stands for what is derived, and no one value is the default."""
    del declared["default"]
    kind = declared.get("type")
    if kind is not None:
        declared["type"] = [kind, "null"]


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
    yield "Paths of files that a run reads are relative to the file that names them, and on the"
    yield "command line to the working directory; the folder of the runs always to the latter."
    yield ""
    yield "A default that is `derived` follows from other keys, as the meaning says; null asks for"
    yield "it. `luyen check` shows the value. What is written never changes."
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
            word = show_default(info)
            default = word if info.required or info.derived else f"`{word}`"
            doc = f"{info.doc} Derived: {info.derived}." if info.derived else info.doc
            name = info.path.rpartition(".")[2]
            yield f"| `{name}` | {default} | {_cell(info.kind)} | {_cell(doc)} |"
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
        yield f"| {name} | {MILDER.get(name, 'error')} | {_cell(doc)} |"
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
    for path, (accepted, reason) in verl_keys.NOTED.items():
        only = " or ".join(f"`{show_value(value)}`" for value in accepted) or "any value"
        yield f"| `{path}` | accepted at {only} with a note: {reason} |"
    for path, ours in verl_keys.RENAMED.items():
        yield f"| `{path}` | read as `{ours}`, with a note |"
    for path, instead in verl_keys.NEAREST.items():
        yield f"| `{path}` | {instead} |"
    yield ""
    yield "## Coming from TRL, LLaMA-Factory or Axolotl"
    yield ""
    words = ", ".join(f"`{word}`" for word in STAGES)
    yield f"`trainer.stage` also takes {words}, and says as what it reads them. These keys are"
    yield "refused with what to write instead:"
    yield ""
    yield "| key there | write |"
    yield "|---|---|"
    for name, ours in FOREIGN.items():
        yield f"| `{name}` | {_cell(ours)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
