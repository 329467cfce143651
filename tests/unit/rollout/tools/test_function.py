"""Tools from typed functions: the schema, the values, the refusals."""

import asyncio
import threading
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from luyen.base.errors import UserError
from luyen.base.records import make_prompt
from luyen.rollout.tools.builtin_tools import calculator_tool
from luyen.rollout.tools.protocol import ToolReply
from luyen.rollout.tools.python_tools import FunctionTool, tool
from luyen.rollout.tools.signature import read_docstring
from luyen.rollout.tools.user_code import InvalidArguments

WHO = threading.get_ident


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Place(BaseModel):
    city: str
    title: str = "home"


@tool
def weather(
    place: Place,
    unit: Unit,
    days: int = 1,
    parts: Optional[list[str]] = None,  # noqa: UP045
    mood: Literal["dry", "wry"] = "dry",
    extra: dict[str, float] = {},  # noqa: B006
    share: Annotated[float, Field(ge=0, le=1)] = 0.5,
) -> str:
    """Forecast for a place.

    It is often wrong.

    Args:
        place (Place): Where.
        days: How many
            days ahead.

    Returns:
        A sentence.
    """
    return f"{type(place).__name__} {place.city} {unit} {days} {parts} {mood} {extra} {share}"


def parameters(made: FunctionTool) -> dict[str, Any]:
    return made.schema["function"]["parameters"]


async def call(made: FunctionTool, **arguments: Any) -> ToolReply:
    session = await made.open(make_prompt([]), 0)
    return await session.call(arguments)


def test_the_schema_comes_from_types_and_docstring():
    assert weather.schema["type"] == "function"
    assert weather.schema["function"]["name"] == "weather"
    assert weather.schema["function"]["description"] == (
        "Forecast for a place.\n\nIt is often wrong."
    )
    found = parameters(weather)
    assert list(found) == ["type", "properties", "required"]
    assert found["required"] == ["place", "unit"]
    assert found["properties"] == {
        "place": {
            "type": "object",
            "description": "Where.",
            "properties": {
                "city": {"type": "string"},
                "title": {"type": "string", "default": "home"},
            },
            "required": ["city"],
        },
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "description": "How many days ahead.", "default": 1},
        "parts": {
            "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
            "default": None,
        },
        "mood": {"type": "string", "enum": ["dry", "wry"], "default": "dry"},
        "extra": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
        "share": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.5},
    }


def test_the_function_gets_python_values_and_its_own_defaults():
    reply = asyncio.run(call(weather, place={"city": "Huế"}, unit="C", parts=["am"]))
    assert reply.text == "Place Huế Unit.CELSIUS 1 ['am'] dry {} 0.5"


def test_a_value_that_only_the_type_refuses_is_the_policys_mistake():
    with pytest.raises(InvalidArguments, match="share"):
        asyncio.run(call(weather, place={"city": "a"}, unit="C", share=2.0))


class Tree(BaseModel):
    leaves: list["Tree"] = []


def test_a_type_that_contains_itself_keeps_its_definition():
    @tool
    def count(tree: Tree) -> int:
        """Count leaves."""
        return len(tree.leaves)

    found = parameters(count)
    assert "Tree" in found["$defs"]
    assert asyncio.run(call(count, tree={"leaves": [{}, {}]})).text == "2"


def test_names_that_pydantic_reserves_are_fine():
    @tool
    def odd(schema: str, model_config: int, _private: int, json: str = "x") -> str:
        """Take odd names."""
        return f"{schema} {model_config} {_private} {json}"

    assert list(parameters(odd)["properties"]) == ["schema", "model_config", "_private", "json"]
    assert asyncio.run(call(odd, schema="a", model_config=1, _private=2)).text == "a 1 2 x"


def test_the_calculator_has_the_schema_that_the_built_in_model_learned():
    from luyen.data.tool_tasks import CALCULATOR

    assert calculator_tool().schema == CALCULATOR
    assert str(calculator_tool().schema) == str(CALCULATOR)


def untyped(a) -> str:
    """Untyped."""
    return str(a)


def scattered(*args: int) -> str:
    """Many."""
    return str(args)


def named(**kwargs: int) -> str:
    """Many."""
    return str(kwargs)


def silent(a: int) -> str:
    return str(a)


def misdocumented(amount: int) -> str:
    """Pay.

    Args:
        amuont: How much.
    """
    return str(amount)


def unspeakable(lock: threading.Event) -> str:
    """Take a lock."""
    return str(lock)


def dangling(a: "Nowhere") -> str:  # noqa: F821
    """Dangle."""
    return str(a)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "parameter `a` has no type.*annotate it"),
        (scattered, r"`\*args: int` takes none by name"),
        (named, r"`\*\*kwargs: int` takes none by name"),
        (silent, "no docstring"),
        (misdocumented, "describes `amuont`.*did you mean `amount`"),
        (unspeakable, "JSON cannot express"),
        (dangling, "cannot be read"),
        (Place, "decorate it with `tool_class`"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_explained(function: Any, said: str):
    with pytest.raises(UserError, match=said):
        tool(function)


def test_a_wrong_limit_is_explained():
    with pytest.raises(UserError, match="did you mean `timeout_s`"):
        tool(timeout=3.0)
    with pytest.raises(UserError, match=r"limits\.retries"):
        tool(retries=0.5)
    with pytest.raises(UserError, match=r"limits\.concurrency"):
        tool(concurrency=0)


def test_a_function_runs_beside_the_loop_and_a_coroutine_function_in_it():
    @tool
    def beside() -> bool:
        """Who runs this?"""
        return WHO() == here

    @tool
    async def inside() -> bool:
        """Who runs this?"""
        return WHO() == here

    here = WHO()
    assert asyncio.run(call(beside)).text == "false"
    assert asyncio.run(call(inside)).text == "true"


def test_calls_that_wait_overlap():
    meeting = threading.Barrier(20, timeout=30)

    @tool
    def meet() -> int:
        """Wait for the others."""
        return meeting.wait()

    async def all_at_once() -> list[str]:
        return [r.text for r in await asyncio.gather(*(call(meet) for _ in range(20)))]

    assert sorted(map(int, asyncio.run(all_at_once()))) == list(range(20))


def test_docstrings_of_several_shapes():
    assert read_docstring("One line.") == ("One line.", {})
    text = (
        "Two\n  lines.\n\n  Args:\n    a: x: y\n    b (int):\n      later\n\n  Raises:\n    E: no"
    )
    assert read_docstring(text) == ("Two lines.", {"a": "x: y", "b": "later"})
