"""Regular expressions of a tool's schema, matched in a time that grows with the text alone.

Python's own matcher can take for ever, on the loop that all conversations share: the server of a
tool writes the expression, and the policy the text.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError
from pydantic_core import SchemaError, SchemaValidator, core_schema
from pydantic_core import ValidationError as NoMatch


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
    except SchemaError:  # it looks around or back, which this matcher does not
        return None


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not matches(pattern, instance):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


def _named(
    validator: Any, schemas: Mapping[str, Any], instance: Any, _: Any
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, schema in schemas.items():
            for name, value in instance.items():
                if matches(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _others(
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
    {"pattern": _pattern, "patternProperties": _named, "additionalProperties": _others},
)
"""Draft 2020-12, with these ways to match."""
