"""W: what judges are given: patterns that compile, knobs of their kind, keys that are set."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from luyen.base.errors import UserError
from luyen.config.judge_keys import judge_key
from luyen.config.knob_values import KNOB_VALUES
from luyen.config.reward_catalog import RULE_REWARDS
from luyen.config.reward_parts import nodes, read_components
from luyen.config.rules.rule import Finding, Situation, rule

_COMPONENTS = "reward.components"
_PATTERNS = {"regex": "pattern", "tool_safety": "forbidden_arguments"}
"""Rule -> the knob that holds regular expressions."""


@rule("W14", "error")
def patterns_are_regular_expressions(s: Situation) -> Iterator[Finding]:
    """Patterns of the rules `regex` and `tool_safety` are regular expressions."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        knob = _PATTERNS.get(component.rule or "")
        if knob is None or knob not in component.kwargs:
            continue
        for pattern in _leaves(component.kwargs[knob]):
            wrong = _wrong(pattern)
            if wrong is not None:
                why = f"`{path}`: {knob} {pattern!r} is no regular expression: {wrong}"
                yield Finding(field=_COMPONENTS, why=why, fix=f"mend {path}.kwargs.{knob}")


@rule("W16", "error")
def knobs_are_of_their_kind(s: Situation) -> Iterator[Finding]:
    """A knob of a built-in rule has a value that the rule can compute with."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        if component.rule not in RULE_REWARDS:
            continue
        for knob, value in component.kwargs.items():
            kind = KNOB_VALUES.get(knob)
            if kind is not None and knob in (RULE_REWARDS[component.rule].knobs or ()):
                wrong = f"expected {kind.words()}" if not kind.takes(value) else ""
                if knob == "schema" and not wrong:
                    wrong = _wrong_schema(value)
                if wrong:
                    why = f"`{path}`: {knob} {value!r}: {wrong}"
                    yield Finding(field=_COMPONENTS, why=why, fix=f"mend {path}.kwargs.{knob}")


@rule("W15", "error")
def keys_of_judges_are_set(s: Situation) -> Iterator[Finding]:
    """The environment variable that holds a judge's key is set."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        if component.judge is None or component.judge.api_key_env is None:
            continue
        try:
            judge_key(component.judge.api_key_env)
        except UserError as error:
            why = f"`{path}`: {error.field} = {error.value}: {error.why}"
            yield Finding(field=_COMPONENTS, why=why, fix=error.fix)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in cast(Mapping[Any, Any], value).values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in cast(list[Any], value):
            yield from _leaves(inner)
    else:
        yield value


def _wrong_schema(schema: Any) -> str:
    """Why a value is no JSON schema; empty: it is one."""
    try:
        Draft202012Validator.check_schema(schema or {})
    except SchemaError as error:
        return f"it is no JSON schema: {error.message}"
    return ""


def _wrong(pattern: Any) -> str | None:
    """Why a value is no regular expression; None: it is one."""
    if not isinstance(pattern, str):
        return "it is no text"
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None
