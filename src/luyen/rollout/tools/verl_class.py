"""Tools written as classes for verl: create, execute, calc_reward, release by instance id."""

import inspect
from collections.abc import Mapping
from itertools import count
from typing import Any, cast, final

from pydantic import BaseModel, ConfigDict

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.rollout.tools.marks import OneAtATime
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.stateful import row_settings
from luyen.rollout.tools.text import as_text

_numbers = count()
"""Instance ids are never used twice in a process."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Parameters(_Open):
    type: str = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []


class _Function(_Open):
    name: str
    description: str = ""
    parameters: _Parameters = _Parameters()


class VerlSchema(_Open):
    """A schema as such classes read it: `schema.function.name`, `schema.model_dump()`."""

    type: str = "function"
    function: _Function


def is_verl_class(found: Any) -> bool:
    """Whether a class has the methods that verl calls."""
    return inspect.isclass(found) and {"create", "execute", "release"} <= set(dir(found))


@final
class VerlTool:
    """One object of such a class, which tells rollouts apart by instance id."""

    def __init__(
        self,
        cls: type[Any],
        *,
        config: Mapping[str, Any],
        schema: Mapping[str, Any] | None,
        limits: ToolLimits | None = None,
    ) -> None:
        given = None if schema is None else VerlSchema.model_validate(schema)
        self._made = cls(dict(config), given)
        self._schema = _schema_of(self._made, schema, cls.__name__)
        self._limits = limits or ToolLimits()

    @property
    def name(self) -> str:
        """How the policy calls it."""
        return self._schema["function"]["name"]

    @property
    def schema(self) -> Mapping[str, Any]:
        """As the configuration wrote it, or as the class says."""
        return self._schema

    @property
    def limits(self) -> ToolLimits:
        """How long and how often it may run."""
        return self._limits

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """A new instance, created with what the row gives."""
        wanted = f"{self.name}-{key:x}-{next(_numbers)}"
        given = row_settings(prompt, self.name, "create_kwargs")
        if given and _takes(self._made.create, "create_kwargs"):
            given = {**given, "create_kwargs": dict(given)}  # where newer classes look for them
        created = await _awaited(self._made.create(wanted, **given))
        first = cast(tuple[Any, ...], created)[0] if isinstance(created, tuple) else created
        settings = {
            kind: row_settings(prompt, self.name, kind)
            for kind in ("execute_kwargs", "calc_reward_kwargs", "release_kwargs")
        }
        return _Session(self._made, first if isinstance(first, str) else wanted, settings)

    async def close(self) -> None:
        """Such classes hold nothing that they could be told to free."""


@final
class _Session(OneAtATime):
    def __init__(self, made: Any, instance: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._made = made
        self._instance = instance
        self._settings = settings

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        given = self._settings["execute_kwargs"]
        returned = await _awaited(self._made.execute(self._instance, dict(arguments), **given))
        if not isinstance(returned, tuple):
            return ToolReply(text=_text(returned))
        response, reward, metrics = (*cast(tuple[Any, ...], returned), None, None)[:3]
        return ToolReply(text=_text(response), reward=reward, metrics=_numbers_in(metrics))

    async def score(self) -> float | None:
        if "calc_reward" not in dir(self._made):
            return None
        given = self._settings["calc_reward_kwargs"]
        return await _awaited(self._made.calc_reward(self._instance, **given))

    async def release(self) -> None:
        given = self._settings["release_kwargs"]
        await _awaited(self._made.release(self._instance, **given))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _schema_of(made: Any, schema: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    if schema is not None:
        return schema
    said = made.get_openai_tool_schema() if "get_openai_tool_schema" in dir(made) else None
    if isinstance(said, BaseModel):
        said = said.model_dump(exclude_unset=True, exclude_none=True)
    if not isinstance(said, Mapping):
        why = f"class {name} says nothing about its arguments"
        raise UserError("tool", name, why, "write `tool_schema` beside `class_name`")
    return cast(Mapping[str, Any], said)


def _text(response: Any) -> str:
    """The text of a response: a string, `{"text": ...}`, or an object with `.text`."""
    if isinstance(response, Mapping):
        held = cast(Mapping[str, Any], response)
        return as_text((held["text"] or "") if "text" in held else held)
    if not isinstance(response, str | bytes) and "text" in dir(response):
        return as_text(response.text or "")
    return as_text(response)


def _numbers_in(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    given = cast(Mapping[Any, Any], metrics)
    return {str(k): float(v) for k, v in given.items() if isinstance(v, int | float)}
