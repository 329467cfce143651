"""How a block and a key are declared."""

from typing import Annotated, Any, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

MOST_MACHINES = 100_000
"""More than any cluster has; a plan lists them one by one."""
MOST_DEVICES = 1024
"""More than any machine has."""


class Block(BaseModel):
    """A frozen group of keys. Unknown keys and values of another type are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, values: Any) -> Any:
        """Without the nulls at derived keys that have no other use for null."""
        if not isinstance(values, dict):
            return values
        given = cast(dict[str, Any], values)
        nulls = {name for name, value in given.items() if value is None}
        left_open = {name for name in nulls & cls.model_fields.keys() if _is_left_open(cls, name)}
        return {name: value for name, value in given.items() if name not in left_open}


def _is_left_open(block: type[Block], name: str) -> bool:
    declared = block.model_fields[name]
    extra = declared.json_schema_extra
    is_derived = isinstance(extra, dict) and "x-derived" in extra
    return is_derived and type(None) not in get_args(declared.annotation)


def key(
    default: Any,
    doc: str,
    *,
    awaits: str | None = None,
    required: bool = False,
    only: str | None = None,
    derived: str | None = None,
    **limits: Any,
) -> Any:
    """Declare a key: default, meaning and limits.

    `awaits` names the part of Luyen that will read it and is not built yet: until then any other
    value is refused. `only` is the reason why the default is the one value we implement. `derived`
    says which value a key has that is not written (`luyen.config.schema.derived` has the rule).
    """
    marks = {
        "x-awaits": awaits,
        "x-required": required or None,
        "x-only": only,
        "x-derived": derived,
    }
    extra = {name: value for name, value in marks.items() if value is not None}
    declare: Any = Field  # limits are pydantic's keyword arguments, passed on as they come
    return declare(default=default, description=doc, json_schema_extra=extra or None, **limits)


def block(kind: type[Block], doc: str) -> Any:
    """Declare a nested block, present with its defaults when the user does not write it."""
    return Field(default_factory=kind, description=doc)


def as_tuple(value: Any) -> Any:
    """A list as a tuple, and one word as a tuple of it; the validator sees to anything else."""
    if isinstance(value, str):
        return (value,)
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


_WORDS = {"type": "array", "items": {"type": "string"}}

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, _WORDS]}),
]
"""One string or a list of strings."""
Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_tuple)]
"""A list of token ids."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(as_tuple)]
"""A list of numbers."""
Steps = Annotated[tuple[int, ...], BeforeValidator(as_tuple)]
"""A list of steps, counted from 1."""
Pair = Annotated[tuple[float, float], BeforeValidator(as_tuple)]
"""A list of two numbers."""
