"""What a key or a rule means: `luyen explain`, `docs/config.md` and the JSON schema."""

from collections.abc import Iterator
from typing import Any, TypeAlias, cast

from luyen.base.errors import UserError, near_names
from luyen.config.catalog import KL_KINDS
from luyen.config.fields import FieldInfo, all_blocks, all_fields, children
from luyen.config.loader import aliases
from luyen.config.loader.aliases import FOREIGN, STAGES
from luyen.config.loader.deprecated import DEPRECATED
from luyen.config.plugins import LOGGERS, PluginRegistry
from luyen.config.problem import TEXT_FINDINGS, TEXT_SEVERITIES
from luyen.config.rules.all import RULES
from luyen.config.schema.run import RunConfig

# The names that a key may hold where it is one of a list that plugins can add to.

_BUILT_IN_NAMES = PluginRegistry()
OPEN: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": tuple(_BUILT_IN_NAMES.estimators),
    "algorithm.kl_penalty": KL_KINDS,
    "actor_rollout_ref.actor.kl_loss_type": KL_KINDS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": tuple(_BUILT_IN_NAMES.losses),
    "actor_rollout_ref.actor.strategy": ("auto", *_BUILT_IN_NAMES.training_engines),
    "actor_rollout_ref.rollout.name": tuple(_BUILT_IN_NAMES.engines),
    "actor_rollout_ref.rollout.multi_turn.format": _BUILT_IN_NAMES.tool_formats,
    "data.sampler.name": _BUILT_IN_NAMES.samplers,
    "preference.loss_type": tuple(_BUILT_IN_NAMES.preference_losses),
    "reward.reward_manager.name": _BUILT_IN_NAMES.reward_managers,
    "sft.loss": _BUILT_IN_NAMES.supervised_losses,
    "trainer.logger": LOGGERS,
}
"""Key -> the names that come with Luyen."""


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """What a key may be, where it is one of a list; empty where it is anything else."""
    return OPEN.get(info.path, info.choices)


# Search: keys, rules and pages that match the given words.

_MOST = 12
"""Keys, and rules, that are listed."""
PAGES: dict[str, str] = {
    "docs/data.md": "rows dataset prompt template system formats gsm8k jsonl parquet sampler",
    "docs/rewards.md": "reward function score rule trl components",
    "docs/judges.md": "judge llm endpoint grader",
    "docs/reward_models.md": "reward model rm value",
    "docs/algorithms": "grpo ppo rloo gae dapo gspo dpo kto loss estimator advantage kl",
    "docs/stages.md": "sft dpo kto preference reward model offline stage finetuning",
    "docs/reliability.md": "resume checkpoint crash interrupt save kill",
    "docs/run_directory.md": "run directory files metrics logger wandb tensorboard",
    "docs/distributed.md": "ray gpu gpus multi node fsdp cluster devices",
    "docs/async.md": "async staleness",
    "docs/tools.md": "tool tools function calling mcp",
    "docs/multi_turn.md": "turns conversation agent multi",
    "docs/environments.md": "environment world env",
    "docs/distillation.md": "distill distillation teacher",
    "docs/evaluation.md": "eval evaluation validation pass@k",
    "docs/commands.md": "command commands sweep cli",
    "docs/doctor.md": "doctor diagnosis",
    "docs/pipelines.md": "pipeline stages",
    "docs/config.md": "configuration keys verl llama-factory lora",
}
"""Page -> words that lead to it."""


def search(text: str) -> str | None:
    """What has to do with the words, or with most of them, the closest first; None: nothing has.

    Example:
        >>> print(search("resume").splitlines()[1].split()[0])
        trainer.resume_mode
    """
    words = text.lower().replace("_", " ").split()
    keys = sorted(
        ((_missing(words, info), _rank(words, info), info) for info in all_fields().values()),
        key=lambda found: found[:2],
    )
    fewest = keys[0][0]
    found = [info for missing, _, info in keys if missing == fewest < len(words)]
    rules = [rule for rule in RULES.values() if all(word in rule.doc.lower() for word in words)]
    pages = [page for page, known in PAGES.items() if all(word in known.split() for word in words)]
    if not (found or rules or pages):
        return None
    return "\n".join(_lines(text, found, [f"{r.id}  {r.doc}" for r in rules], pages))


_NEVER = 5


def _missing(words: list[str], info: FieldInfo) -> int:
    """How many of the words have nothing to do with a key."""
    if _rank(words, info) < _NEVER:
        return 0
    return sum(_rank([word], info) == _NEVER for word in words)


def _rank(words: list[str], info: FieldInfo) -> int:
    """How close a key is to the words: 0 for its name, up to what is said about it."""
    name = info.path.rpartition(".")[2].replace("_", " ")
    texts = (
        name.split(),
        [choice.lower() for choice in choices_of(info)],
        name,
        info.path.lower().replace("_", " "),
        f"{info.doc} {info.derived or ''}".lower(),
    )
    for rank, known in enumerate(texts):
        if all(word in known for word in words):
            return rank
    return _NEVER


def _lines(text: str, keys: list[FieldInfo], rules: list[str], pages: list[str]) -> Iterator[str]:
    yield f"About `{text}`:"
    for info in keys[:_MOST]:
        yield f"  {info.path}  {info.doc}"
    if len(keys) > _MOST:
        yield f"  and {len(keys) - _MOST} more keys"
    for rule in rules[:_MOST]:
        yield f"  rule {rule}"
    if pages:
        yield f"  read {', '.join(pages)}"
    yield "`luyen explain KEY` says more about one of them."


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
    if name.upper() in TEXT_FINDINGS:
        return f"{name.upper()}\n  {TEXT_FINDINGS[name.upper()]}"
    if name in DEPRECATED:
        entry = DEPRECATED[name]
        return f"{name}\n  The old name of `{entry.new}`; version {entry.ends} does not read it."
    if name in aliases.MOOT:
        accepted, reason = aliases.MOOT[name]
        only = " or ".join(repr(value) for value in accepted)
        return f"{name}\n  A key of verl, accepted at {only}: {reason}."
    if name in aliases.NOTED:
        return f"{name}\n  A key of verl, accepted with a note: {aliases.NOTED[name][1]}."
    if name in aliases.RENAMED:
        return f"{name}\n  Another name for {aliases.RENAMED[name]}, and read as it."
    instead = aliases.nearest(name)
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


# `docs/config.md` and the JSON schema, generated from the schema models.


def json_schema() -> dict[str, Any]:
    """A JSON schema for editors: completion, types and meanings while typing YAML."""
    schema = RunConfig.model_json_schema()
    for block in (schema, *schema["$defs"].values()):
        for declared in block.get("properties", {}).values():
            if "x-derived" in declared:
                _leave_open(declared)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _leave_open(declared: dict[str, Any]) -> None:
    """Null stands for a derived default, which is not one value."""
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
    yield "A default that is `derived` follows from other keys, as the meaning says; null selects"
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
    if any(info.awaits for info in all_fields().values()):
        yield "A key whose reader is not built yet is refused at any value but its default (C009)."
    yield "A key with a single possible value is refused at any other (C010)."
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
    for name, doc in TEXT_FINDINGS.items():
        yield f"| {name} | {TEXT_SEVERITIES.get(name, 'error')} | {_cell(doc)} |"
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
    for path, (accepted, reason) in aliases.MOOT.items():
        only = " or ".join(f"`{show_value(value)}`" for value in accepted)
        yield f"| `{path}` | accepted at {only}: {reason} |"
    for path, (accepted, reason) in aliases.NOTED.items():
        only = " or ".join(f"`{show_value(value)}`" for value in accepted) or "any value"
        yield f"| `{path}` | accepted at {only} with a note: {reason} |"
    for path, ours in aliases.RENAMED.items():
        yield f"| `{path}` | read as `{ours}`, with a note |"
    for path, instead in aliases.NEAREST.items():
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
