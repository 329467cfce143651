"""The keys of the configuration as a flat list: the view that documents, checks and explains."""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, final

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo as PydanticField

from luyen.config.schema.run import RunConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """One key of the configuration.

    Example:
        >>> field("actor_rollout_ref.rollout.top_k").default
        -1
    """

    path: str
    """Dotted key from the root."""
    kind: str
    """Type and limits in words."""
    default: Any
    """Value in force when nothing is written; that of a derived key is a stand-in."""
    doc: str
    """What the key means."""
    awaits: str | None
    """The part of Luyen that will read it, when that part is not built yet."""
    only: str | None
    """Why the default is the one value we implement, when it is."""
    derived: str | None
    """Which value is in force when nothing is written, where other keys decide it."""
    required: bool
    """Whether a run cannot start without a value."""
    choices: tuple[str, ...]
    """The words it may be, when it is one of a fixed set."""
    is_open: bool
    """Whether the value is a free mapping, whose inner keys are the user's."""


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Every leaf key by its path, in the order of the schema."""
    return {info.path: info for info in _leaves(RunConfig, "")}


@cache
def all_blocks() -> dict[str, str]:
    """Every block by its path, with its meaning; the root is the empty path."""
    return dict(_blocks(RunConfig, "", "A whole run, in six blocks."))


def walk() -> Iterator[FieldInfo]:
    """Every leaf key."""
    yield from all_fields().values()


def field(path: str) -> FieldInfo:
    """The key at a path; KeyError when there is none."""
    return all_fields()[path]


def children(block: str) -> list[str]:
    """Names written directly under a block, keys and blocks alike."""
    prefix = f"{block}." if block else ""
    paths = [*all_fields(), *all_blocks()]
    inner = (p.removeprefix(prefix) for p in paths if p.startswith(prefix) and p != block)
    return list(dict.fromkeys(name.split(".")[0] for name in inner if name))


def _inner_block(declared: PydanticField) -> type[BaseModel] | None:
    kind = declared.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _blocks(model: type[BaseModel], path: str, doc: str) -> Iterator[tuple[str, str]]:
    yield path, doc
    for name, declared in model.model_fields.items():
        inner = _inner_block(declared)
        if inner is not None:
            below = f"{path}.{name}" if path else name
            yield from _blocks(inner, below, declared.description or "")


def _leaves(model: type[BaseModel], path: str) -> Iterator[FieldInfo]:
    defaults = model()
    for name, declared in model.model_fields.items():
        below = f"{path}.{name}" if path else name
        inner = _inner_block(declared)
        if inner is not None:
            yield from _leaves(inner, below)
        else:
            yield _leaf(below, declared, vars(defaults)[name])


def _leaf(path: str, declared: PydanticField, default: Any) -> FieldInfo:
    extra = declared.json_schema_extra
    marks = cast(dict[str, Any], extra) if isinstance(extra, dict) else {}
    return FieldInfo(
        path=path,
        kind=_describe(declared),
        default=default,
        doc=declared.description or "",
        awaits=marks.get("x-awaits"),
        only=marks.get("x-only"),
        derived=marks.get("x-derived"),
        required=bool(marks.get("x-required")),
        choices=tuple(str(choice) for choice in _choices(declared.annotation)),
        is_open=typing.get_origin(declared.annotation) is dict,
    )


def _choices(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is Literal:
        yield from typing.get_args(kind)
    elif typing.get_origin(kind) in (types.UnionType, typing.Union):
        for part in typing.get_args(kind):
            yield from _choices(part)


def _describe(declared: PydanticField) -> str:
    """Type and limits of a field, as a user would say them."""
    words = _type_words(declared.annotation)
    limits = [limit for item in declared.metadata for limit in _limits(item)]
    return words + (f", {' and '.join(limits)}" if limits else "")


def _limits(item: object) -> Iterator[str]:
    match item:
        case Ge(ge=bound):
            yield f">= {bound}"
        case Gt(gt=bound):
            yield f"> {bound}"
        case Le(le=bound):
            yield f"<= {bound}"
        case Lt(lt=bound):
            yield f"< {bound}"
        case _:
            return


_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
}


def _type_words(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_words(part) for part in inner)
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        if typing.get_origin(inner[0]) is Literal:
            return f"a list out of {', '.join(map(str, typing.get_args(inner[0])))}"
        return f"a list of {count}" + _type_words(inner[0]).removeprefix("a ") + "s"
    return "a mapping"
