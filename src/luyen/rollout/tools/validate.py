"""Arguments written by the policy, validated against a tool's schema.

The messages are read by the policy: short, with the argument, the problem and what is expected.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast, final

from jsonschema import Draft202012Validator, exceptions, validators
from jsonschema.exceptions import SchemaError, ValidationError
from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema
from pydantic_core import ValidationError as NoMatch
from referencing import Registry

from luyen.base.errors import UserError, near_names
from luyen.rollout.tools.user_code import InvalidArguments, one_line

# Patterns of a schema are matched in linear time. An MCP server writes the pattern and the policy
# writes the text, so Python's backtracking matcher could block the shared event loop for ever.


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text; where it cannot be matched safely, it is for the tool.

    Example:
        >>> matches("^(a+)+$", "a" * 100_000 + "!"), matches("^[a-z]+$", "tea")
        (False, True)
    """
    matcher = _matcher(pattern)
    if matcher is None:
        return True
    try:
        matcher.validate_python(text)
    except NoMatch:
        return False
    return True


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> SchemaValidator | None:
    try:
        config = core_schema.CoreConfig(regex_engine="rust-regex")
        return SchemaValidator(core_schema.str_schema(pattern=pattern), config)
    except PatternError:  # it looks around or back, which this matcher does not
        return None


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not matches(pattern, instance):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, schemas: Mapping[str, Any], instance: Any, _: Any
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, schema in schemas.items():
            for name, value in instance.items():
                if matches(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, schema: Any, instance: Any, whole: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Keys that neither `properties` nor `patternProperties` names."""
    if isinstance(instance, dict):
        patterns = whole.get("patternProperties", {})
        known = whole.get("properties", {})
        for name, value in instance.items():
            if name in known or any(matches(pattern, name) for pattern in patterns):
                continue
            if schema is False:
                yield ValidationError(f"{name!r} is not one of its keys")
            elif isinstance(schema, dict):
                yield from validator.descend(value, schema, path=name)


SafeValidator: Any = validators.extend(
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    },
)
"""Draft 2020-12 with patterns matched in linear time."""


_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_WORDS = {"true": True, "false": False}
_ARTICLES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


@final
class Validator:
    """Validates arguments against one tool's parameters.

    Example:
        >>> integer = {"a": {"type": "integer"}}
        >>> schema = {"type": "object", "properties": integer, "required": ["a"]}
        >>> validator = Validator("add", schema)
        >>> validator.fit({"a": 3}), validator.fit({"a": "3"}, from_text=True)
        ({'a': 3}, {'a': 3})
        >>> validator.fit({"a": "3"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        luyen...InvalidArguments: argument `a` must be an integer, not a string
    """

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        """A UserError when the parameters are no JSON schema."""
        try:
            Draft202012Validator.check_schema(dict(parameters))
        except SchemaError as error:
            why = f"its parameters are no JSON schema: {one_line(error.message)}"
            raise UserError("tool", name, why, "fix the schema") from error
        self._properties = cast(Mapping[str, Any], parameters.get("properties") or {})
        self._is_open = parameters.get("additionalProperties") not in (None, False)
        # An empty registry: a schema that points elsewhere is an error, never a download.
        self._validator: Any = SafeValidator(dict(parameters), registry=Registry())

    def fit(self, arguments: Mapping[str, Any], *, from_text: bool = False) -> dict[str, Any]:
        """The arguments as the tool takes them; InvalidArguments when they do not fit.

        `from_text` is for formats that write every argument as text: a text that can only mean one
        value of the declared type becomes that value.
        """
        if not self._is_open:
            self._require_known(arguments)
        fitted = {
            name: _read(value, self._types(name), from_text=from_text)
            for name, value in arguments.items()
        }
        try:
            errors = self._validator.iter_errors(fitted)
            error: ValidationError | None = cast(Any, exceptions).best_match(errors)
        except RecursionError as deep:
            raise InvalidArguments("the arguments are nested too deeply") from deep
        if error is not None:
            raise InvalidArguments(self._message(error))
        return fitted

    def _types(self, name: str) -> frozenset[str]:
        return _types_of(self._properties.get(name))

    def _require_known(self, arguments: Mapping[str, Any]) -> None:
        for name in arguments:
            if name in self._properties:
                continue
            near = near_names(name, self._properties, most=1)
            listed = ", ".join(f"`{known}`" for known in self._properties)
            offered = f"did you mean `{near[0]}`?" if near else f"known: {listed or 'none'}"
            raise InvalidArguments(f"unknown argument `{one_line(name)}`; {offered}")

    def _message(self, error: ValidationError) -> str:
        where = _path(error)
        if error.validator == "required":
            inside = f" of `{where}`" if where else ""
            required = cast(list[str], error.validator_value)
            missing = [name for name in required if name not in cast(Any, error.instance)]
            types = "" if where else _expected(self._types(missing[0]))
            return f"missing argument `{missing[0]}`{inside}" + (f" ({types})" if types else "")
        subject = f"argument `{where}`" if where else "the arguments"
        if error.validator in ("type", "anyOf", "oneOf"):
            expected = _expected(_types_of(cast(Any, error.schema)))
            if expected:
                return f"{subject} must be {expected}, not {_kind(error.instance)}"
        if error.validator == "enum":
            choices = cast(list[Any], error.validator_value)
            listed = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return f"{subject} must be one of {listed}"
        return f"{subject}: {one_line(error.message)}"


def _path(error: ValidationError) -> str:
    """Where in the arguments: `lines[2].text`."""
    text = ""
    for part in error.absolute_path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return one_line(text.removeprefix("."))


def _types_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema admits; empty when it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    fields = cast(dict[str, Any], schema)
    if "enum" in fields:
        return frozenset(_json_type(value) for value in fields["enum"])
    if "type" in fields:
        named = fields["type"]
        return frozenset([named] if isinstance(named, str) else named)
    choices: list[Any] = fields.get("anyOf") or fields.get("oneOf") or []
    types = [_types_of(choice) for choice in choices]
    return frozenset[str]().union(*types) if all(types) else frozenset[str]()


def _json_type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    found = [name for kind, name in kinds.items() if isinstance(value, kind)]
    return "null" if value is None else (*found, "object")[0]


def _expected(types: frozenset[str]) -> str:
    return " or ".join(_ARTICLES[name] for name in _ARTICLES if name in types)


def _kind(value: Any) -> str:
    return _ARTICLES[_json_type(value)] if not isinstance(value, bool) else json.dumps(value)


def _read(value: Any, types: frozenset[str], *, from_text: bool) -> Any:
    """The value converted to the declared type, where that is unambiguous."""
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return value if "number" in types else int(value)
    if not (from_text and isinstance(value, str)) or "string" in types or not types:
        return value
    text = value.strip()
    if text in ("null", "None") and "null" in types:
        return None
    if text.lower() in _WORDS and "boolean" in types:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text) and types & {"integer", "number"}:
        return int(text)
    if "number" in types and (number := _number(text)) is not None:
        return number
    if types & {"array", "object"} and text[:1] in ("[", "{"):
        return _structure(text, value)
    return value


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in text else None


def _structure(text: str, otherwise: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
