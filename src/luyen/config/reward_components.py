"""`reward.components` and `reward.routes`: parsed, with the rules, arguments and score names."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast, final

from pydantic import ValidationError

from luyen.base.errors import UserError
from luyen.config.schema.reward import ComponentConfig, GateConfig, RewardConfig
from luyen.config.schema.run import RunConfig

_NO_NAME = "a name is not empty, and holds no `/` and no control characters"


def read_components(reward: RewardConfig) -> tuple[dict[str, ComponentConfig], list[str]]:
    """The components by name, and a sentence for each that is not well formed.

    An enabled reward model is the only component where no other is configured.

    Example:
        >>> reward = RewardConfig(components={"right": {"rule": "exact"}})
        >>> read_components(reward)[0]["right"].weight
        1.0
        >>> read_components(RewardConfig(components={"right": {"rule": "exact", "wieght": 2}}))[1]
        ['`right`: wieght: Extra inputs are not permitted']
    """
    if is_model_alone(reward):
        return {"reward_model": ComponentConfig(model="reward_model")}, []
    components: dict[str, ComponentConfig] = {}
    wrong: list[str] = []
    for name, written in reward.components.items():
        if not _is_name(name):
            wrong.append(f"`{name}`: {_NO_NAME}")
            continue
        if not isinstance(written, Mapping):
            wrong.append(f"`{name}`: expected {{rule: RULE, weight: 1.0, kwargs: {{...}}}}")
            continue
        try:
            read = ComponentConfig.model_validate(dict(cast(Mapping[str, Any], written)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            wrong.append(f"`{name}`: {where}: {first['msg']}")
            continue
        faults = [why for path, node in nodes({name: read}) for why in _misshapen(path, node)]
        wrong += faults
        if not faults:
            components[name] = read
    return components, wrong


def is_model_alone(reward: RewardConfig) -> bool:
    """Whether the reward model alone scores every row."""
    own = reward.custom_reward_function.path is not None
    return reward.reward_model.enable and not (reward.components or reward.routes or own)


def nodes(
    components: Mapping[str, ComponentConfig], above: str = ""
) -> Iterator[tuple[str, ComponentConfig]]:
    """Every node of a tree by its path, the one above before those below.

    Example:
        >>> tree = {"style": ComponentConfig(parts={"brief": ComponentConfig(rule="length")})}
        >>> [path for path, _ in nodes(tree)]
        ['style', 'style/brief']
    """
    for name, component in components.items():
        yield f"{above}{name}", component
        yield from nodes(component.parts or {}, f"{above}{name}/")


def _misshapen(path: str, node: ComponentConfig) -> Iterator[str]:
    """What is wrong with one node, regardless of its siblings."""
    for part in node.parts or {}:
        if not _is_name(part):
            yield f"`{path}`: parts: `{part}`: {_NO_NAME}"
    sources = (node.rule, node.judge, node.model, node.parts)
    if sum(source is not None for source in sources) != 1:
        yield f"`{path}`: it has exactly one of rule, judge, model and parts"
    if node.parts == {}:
        yield f"`{path}`: parts: there is none"
    if node.kwargs and node.rule is None:
        yield f"`{path}`: kwargs are arguments of a rule, and it has no rule"
    if node.combine != "sum" and node.parts is None:
        yield f"`{path}`: combine is about parts, and it has none"
    if node.floor is not None and node.ceiling is not None and node.floor > node.ceiling:
        yield f"`{path}`: floor {node.floor:g} is above ceiling {node.ceiling:g}"
    gate = node.gate
    if gate is not None and gate.below is not None and gate.below <= opens_at(gate):
        yield f"`{path}`: gate: no value is at least {opens_at(gate):g} and below {gate.below:g}"


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and name.isprintable()


def opens_at(gate: GateConfig) -> float:
    """The least value of the sibling with which a gate is open."""
    if gate.at_least is not None:
        return gate.at_least
    return 1.0 if gate.below is None else -inf


def scoring_order(components: Mapping[str, ComponentConfig], combine: str) -> list[tuple[str, ...]]:
    """Siblings in waves, each depending only on earlier ones; incomplete if gates form a cycle.

    Example:
        >>> siblings = {"polite": ComponentConfig(rule="json", gate=GateConfig(by="right")),
        ...             "right": ComponentConfig(rule="exact")}
        >>> scoring_order(siblings, "sum")
        [('right',), ('polite',)]
    """
    waves: list[tuple[str, ...]] = []
    known: set[str] = set()
    while True:
        ready = [
            n for n in components if n not in known and needed(n, components, combine) <= known
        ]
        if not ready:
            return waves
        waves.append(tuple(ready))
        known |= set(ready)


def needed(name: str, components: Mapping[str, ComponentConfig], combine: str) -> set[str]:
    """Siblings that must be scored before a node, because its gate or order depends on them."""
    gate = components[name].gate
    found = set[str]() if gate is None else {gate.by}
    if combine == "lexicographic":
        names = list(components)
        found |= set(names[: names.index(name)])
    return found


def read_routes(reward: RewardConfig) -> dict[str, tuple[str, ...]]:
    """Pattern of a data source -> names of components or rules.

    Example:
        >>> read_routes(RewardConfig(routes={"math*": ["math", "brief"], "sum": "exact"}))
        {'math*': ('math', 'brief'), 'sum': ('exact',)}
    """
    return {str(pattern): _names(named) for pattern, named in reward.routes.items()}


def _names(named: Any) -> tuple[str, ...]:
    if isinstance(named, list | tuple):
        return tuple(str(name) for name in cast(list[Any], named))
    return (str(named),)


# Facts about the built-in reward rules, without importing them.
#
# The rewards package registers functions under these names; a test keeps both equal, arguments
# included.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """What a rule takes and needs.

    Example:
        >>> RULE_REWARDS["math"].package
        'math_verify'
    """

    hparams: tuple[str, ...] | None = ()
    """Names it may be given under `kwargs`; None when a plugin does not say."""
    required: tuple[str, ...] = ()
    """Those without a default."""
    package: str | None = None
    """Python package that must be installed."""
    extra: str | None = None
    """Extra of this package that brings it."""


RULE_REWARDS: dict[str, RuleFacts] = {
    "exact": RuleFacts(hparams=("strip", "ignore_case")),
    "numeric": RuleFacts(hparams=("tolerance",)),
    "gsm8k": RuleFacts(hparams=("method", "format_score")),
    "math": RuleFacts(hparams=("float_rounding",), package="math_verify", extra="math"),
    "choice": RuleFacts(hparams=("choices",)),
    "regex": RuleFacts(hparams=("pattern", "match"), required=("pattern",)),
    "json": RuleFacts(hparams=("required", "fenced")),
    "json_schema": RuleFacts(hparams=("schema", "fenced")),
    "ifeval": RuleFacts(hparams=("mode", "credit")),
    "reasoning_gym": RuleFacts(hparams=("tag",), package="reasoning_gym", extra="tasks"),
    "code": RuleFacts(hparams=("credit", "cpu_s", "memory_mb", "refuse_forgeable")),
    "length": RuleFacts(hparams=("free", "max_response_length")),
    "overlong": RuleFacts(
        hparams=("buffer", "penalty_factor", "max_response_length"), required=("buffer",)
    ),
    "cosine": RuleFacts(hparams=("at_zero", "at_limit", "when_cut", "max_response_length")),
    "repetition": RuleFacts(hparams=("ngram", "unit")),
    "tool_valid": RuleFacts(hparams=("without",)),
    "tool_success": RuleFacts(hparams=("without",)),
    "tool_needless": RuleFacts(hparams=("allowed",)),
    "tool_cost": RuleFacts(hparams=("per_call", "per_second", "per_character", "prices")),
    "tool_safety": RuleFacts(
        hparams=("forbidden_tools", "forbidden_arguments", "secrets", "longest_query", "canaries")
    ),
    "given": RuleFacts(hparams=("without",)),
}


# Types and limits of the arguments of built-in rules, checked before anything is scored.
#
# A test keeps the kinds equal to the annotations of the rules.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpec:
    """A kind of value, and its limit.

    Example:
        >>> ArgumentSpec(kind="whole", least=1).words()
        'a whole number >= 1'
    """

    kind: str
    """whole, number, flag, text, texts, object, numbers by name, or one of `choices`."""
    least: float | None = None
    """Smallest number, or fewest letters of a text."""
    choices: tuple[str, ...] = ()
    """Words that it may be."""
    is_optional: bool = False
    """Whether it may be null."""

    def words(self) -> str:
        """The kind as a user would say it."""
        said = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.kind]
        limit = f" >= {self.least:g}" if self.least is not None and self.kind != "text" else ""
        return f"{said}{limit}{' or null' if self.is_optional else ''}"

    def takes(self, value: object) -> bool:
        """Whether a value is of this kind and within its limit."""
        if value is None:
            return self.is_optional
        if self.choices:
            return value in self.choices
        return _TAKES[self.kind](value, -math.inf if self.least is None else self.least)


def _is_number(value: object, least: float) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(cast(float, value)) and cast(float, value) >= least


def _are_texts(value: object, least: float) -> bool:  # noqa: ARG001 a list has no least
    return isinstance(value, list) and all(isinstance(v, str) for v in cast(list[Any], value))


def _are_numbers(value: object, least: float) -> bool:
    inner = cast(Mapping[str, object], value).values() if isinstance(value, Mapping) else [None]
    return all(_is_number(one, least) for one in inner)


_WORDS = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "text": "a text that is not empty",
    "texts": "a list of texts",
    "object": "a mapping",
    "numbers": "numbers by name",
}
_TAKES: dict[str, Callable[[object, float], bool]] = {
    "whole": lambda value, least: isinstance(value, int) and _is_number(value, least),
    "number": _is_number,
    "flag": lambda value, _: isinstance(value, bool),
    "text": lambda value, _: isinstance(value, str) and bool(value),
    "texts": _are_texts,
    "object": lambda value, _: isinstance(value, Mapping),
    "numbers": _are_numbers,
}
_NUMBER, _FLAG, _TEXTS = (
    ArgumentSpec(kind="number"),
    ArgumentSpec(kind="flag"),
    ArgumentSpec(kind="texts"),
)


def _whole(least: int, *, is_optional: bool = False) -> ArgumentSpec:
    return ArgumentSpec(kind="whole", least=least, is_optional=is_optional)


def _one_of(*choices: str) -> ArgumentSpec:
    return ArgumentSpec(kind="choice", choices=choices)


ARGUMENT_SPECS: dict[str, ArgumentSpec] = {
    **dict.fromkeys(("strip", "ignore_case", "fenced", "secrets", "refuse_forgeable"), _FLAG),
    **dict.fromkeys(("at_zero", "at_limit", "without", "format_score"), _NUMBER),
    **dict.fromkeys(("per_call", "per_second", "per_character"), _NUMBER),
    **dict.fromkeys(("tolerance", "penalty_factor"), ArgumentSpec(kind="number", least=0)),
    **dict.fromkeys(("required", "forbidden_tools", "canaries"), _TEXTS),
    **dict.fromkeys(("cpu_s", "memory_mb", "ngram", "buffer"), _whole(1)),
    **dict.fromkeys(("free", "float_rounding"), _whole(0)),
    **dict.fromkeys(("max_response_length", "longest_query"), _whole(1, is_optional=True)),
    **dict.fromkeys(("choices", "tag"), ArgumentSpec(kind="text")),
    "allowed": _whole(0, is_optional=True),
    "when_cut": ArgumentSpec(kind="number", is_optional=True),
    "prices": ArgumentSpec(kind="numbers", is_optional=True),
    "schema": ArgumentSpec(kind="object", is_optional=True),
    "credit": _one_of("all", "share"),
    "method": _one_of("strict", "flexible"),
    "mode": _one_of("strict", "loose"),
    "match": _one_of("full", "search"),
    "unit": _one_of("token", "word"),
}
"""Argument -> what it may be, in every built-in rule that has it. W14 checks patterns."""


# Names of scores, as far as they are known before anything is scored.

_WHOLE = ("reward", "score")
_DIVIDED = ("code", "given", "tool_cost", "tool_safety", "tool_valid", "tool_success")
"""Rules whose score may have parts of its own."""
_BUILT_IN = {"arithmetic": "exact", "tools": "exact", "reasoning_gym": "reasoning_gym"}
"""Source of rows -> the rule that scores them by default."""


def score_names(config: RunConfig) -> tuple[str, ...] | None:
    """Every name that a part of the reward has, and those of the whole; None: scoring shows.

    Example:
        >>> score_names(RunConfig()) is None
        True
    """
    reward = config.reward
    components, wrong = read_components(reward)
    is_plain = reward.reward_manager.name in ("naive", "dapo", "prime")
    if reward.custom_reward_function.path is not None or wrong or not is_plain:
        return None
    routed = [name for names in read_routes(reward).values() for name in names]
    if not components and not routed:
        routed = _default_rules(config)
    parts = dict(nodes(components))
    rules = [*(n for n in routed if n not in components)]
    rules += [node.rule for node in parts.values() if node.rule is not None]
    if not (parts or routed) or any(r not in RULE_REWARDS or r in _DIVIDED for r in rules):
        return None
    named = [path.rpartition("/")[2] for path in parts]
    penalty = ["overlong"] if reward.overlong_buffer.enable else []
    return tuple(dict.fromkeys([*_WHOLE, *named, *routed, *penalty]))


def _default_rules(config: RunConfig) -> list[str]:
    """The built-in rules of the rows; none where files hold some of them."""
    schemes = [path.partition("://")[0] for path in config.data.train_files]
    is_known = all(scheme in _BUILT_IN for scheme in schemes)
    return [_BUILT_IN[scheme] for scheme in schemes] if is_known else []


# API keys of judges, which only the environment holds.


def judge_api_key(variable: str) -> str:
    """The key that an environment variable holds; a UserError where it holds none.

    Example:
        >>> try:
        ...     judge_api_key("NO_SUCH_KEY")
        ... except UserError as error:
        ...     error.fix
        'export NO_SUCH_KEY=...'
    """
    try:
        key = os.environ.get(variable, "").strip()
    except (ValueError, UnicodeError):  # no variable can have this name
        key = ""
    if not key or not key.isascii() or not key.isprintable():
        why = "the environment variable is not set, or holds no key"
        raise UserError("judge.api_key_env", variable, why, f"export {variable}=...")
    return key
