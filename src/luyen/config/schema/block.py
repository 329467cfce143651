"""How a block and a key are declared."""

from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


class Block(BaseModel):
    """A frozen group of keys. Unknown keys and values of another type are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False
    )


def key(
    default: Any,
    doc: str,
    *,
    awaits: str | None = None,
    required: bool = False,
    only: str | None = None,
    **limits: Any,
) -> Any:
    """Declare a key: default, meaning and limits.

    `awaits` names the part of Luyen that will read it and is not built yet: until then any other
    value is refused. `only` is the reason why the default is the one value we implement.
    """
    marks = {"x-awaits": awaits, "x-required": required or None, "x-only": only}
    extra = {name: value for name, value in marks.items() if value is not None}
    declare: Any = Field  # limits are pydantic's keyword arguments, passed on as they come
    return declare(default=default, description=doc, json_schema_extra=extra or None, **limits)


def block(kind: type[Block], doc: str) -> Any:
    """Declare a nested block, present with its defaults when the user does not write it."""
    return Field(default_factory=kind, description=doc)


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


_WORDS = {"type": "array", "items": {"type": "string"}}

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, _WORDS]}),
]
"""One string or a list of strings."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
"""A list of numbers."""
Steps = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
"""A list of steps, counted from 1."""
Pair = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
"""A list of two numbers."""
