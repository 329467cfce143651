"""Rules about the format of an answer: a pattern it follows, JSON that parses or fits a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from luyen.base.records import Prompt
from luyen.rewards.rules.rule import Answer, Unscorable, rule_rewards

_FENCED = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*\Z", re.DOTALL)


@rule_rewards.register("regex", isolated=True, deterministic=True, wrong=0.0)
def regex(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    pattern: str,
    match: Literal["full", "search"] = "full",
) -> float:
    """1 when the whole answer (or, with `search`, some part of it) follows the pattern.

    A dot matches line ends too. It runs isolated: a pattern that backtracks for ever times out.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise Unscorable(f"pattern {pattern!r} is no regular expression: {error}") from error
    found = compiled.fullmatch(answer.text) if match == "full" else compiled.search(answer.text)
    return float(found is not None)


@rule_rewards.register("json", wrong=0.0)
def json_valid(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    required: Sequence[str] = (),
    fenced: bool = True,
) -> float:
    """1 when the answer is JSON and holds every required key at its top; a fence is allowed."""
    try:
        value = parsed_json(answer.text, fenced=fenced)
    except (ValueError, RecursionError):
        return 0.0
    if not required:
        return 1.0
    return float(isinstance(value, dict) and all(name in value for name in required))


def parsed_json(text: str, *, fenced: bool = True) -> Any:
    """The value of a text that is JSON, in a fence if that is allowed; NaN and infinity are not."""
    fence = _FENCED.match(text) if fenced else None
    return json.loads(fence.group(1) if fence else text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


# JSON that fits a schema: one for all rows, or the row's own.


@rule_rewards.register("json_schema", isolated=True, deterministic=True, wrong=0.0)
def json_schema(
    prompt: Prompt, answer: Answer, *, schema: Mapping[str, Any] | None = None, fenced: bool = True
) -> float:
    """1 when the answer is JSON that fits the schema: `schema`, else `extra_info["json_schema"]`,
    else the ground truth. A fence around it is allowed.

    It runs isolated: a pattern in a schema may backtrack for ever. Nothing is downloaded; a schema
    with references to other documents cannot score.
    """
    validator = _validator(json.dumps(_schema_of(prompt) if schema is None else dict(schema)))
    try:
        value = parsed_json(answer.text, fenced=fenced)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(validator.is_valid(value))
    except Unresolvable as error:
        raise Unscorable(f"the schema points to what it does not hold: {error}") from error


def _schema_of(prompt: Prompt) -> Any:
    found = prompt.extra_info.get("json_schema", prompt.ground_truth)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise Unscorable(f"the row's schema is no JSON: {error}") from error
    if not isinstance(found, Mapping | bool):
        why = 'the row has no schema in extra_info["json_schema"] or as its ground truth'
        raise Unscorable(f"{why} (data source `{prompt.data_source}`)")
    return dict(cast(Mapping[str, Any], found)) if isinstance(found, Mapping) else found


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    """The validator of a schema, for the draft that it names; the newest without one."""
    schema = json.loads(text)
    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise Unscorable(f"the schema is none: {error.message[:200]}") from error
    return kind(schema, registry=Registry())
