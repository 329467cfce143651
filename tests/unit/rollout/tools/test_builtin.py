"""The tools that come with the package."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, ToolCall, make_prompt
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.builtin_tools import SearchIndex, evaluate, python_tool, search_tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.user_code import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2*3", "7"),
        ("(1+2) \u00d7 3 ÷ 2", "4.5"),
        ("2^100", str(2**100)),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("10/5", "2"),
        ("1e3 + .5", "1000.5"),
        ("sqrt(16) + abs(-2) + round(2.5)", "8"),
        ("round(1234, -2)", "1200"),
        ("round(1, -10**9)", "0"),
        ("round(1.5, -10**300)", "0"),
        ("round(2.345, 2)", "2.35"),
        ("max(1, 2, min(5, 4))", "4"),
        ("2*pi", f"{2 * math.pi:.12g}"),
        ("(-1) ** 1000001", "-1"),
        ("2 ** -1", "0.5"),
    ],
)
def test_the_calculator_computes(expression: str, value: str):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9**9**9", "thousand digits"),
        ("10**1000 * 10**1000", "thousand digits"),
        ("1e308 * 10", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "no real number"),
        ("sqrt(-1)", "no value"),
        ("10.0 ** 400", "no value"),
        ("2 +", "well formed"),
        ("(1", "well formed"),
        ("sqrt", "well formed"),
        ("round(1, x=2)", "no function `x`"),
        ("", "empty"),
        ("__import__('os')", "no arithmetic"),
        ("open(1)", "no function `open`"),
        ("1if 2else 3", "no arithmetic"),
        ("a := 1", "no function `a`"),
        ("1" * 1001, "1000 characters"),
        ("(" * 900, "deep|well formed"),
        ("-" * 999 + "1", "deep"),
    ],
)
def test_what_cannot_be_computed_is_explained(expression: str, said: str):
    with pytest.raises(ToolError, match=said):
        evaluate(expression)


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30), st.sampled_from("+-*"))
def test_integers_are_exact(a: int, b: int, sign: str):
    exact = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert evaluate(f"({a}) {sign} ({b})") == str(exact)


@given(st.text() | st.text("0123456789+-*/%^(). e", max_size=60))
@example(":\n0")
def test_any_text_has_a_value_or_a_reason(text: str):
    try:
        assert evaluate(text)
    except ToolError as error:
        assert "\n" not in str(error)  # noqa: PT017


def called(box: ToolRegistry, name: str, **arguments: str) -> ToolCall:
    async def run() -> ToolCall:
        tools = await box.open(make_prompt([]), 0)
        return await tools.call(WrittenCall(name=name, arguments=arguments), 0)

    return asyncio.run(run())


def test_search_by_words_ranks_and_keeps_ties_in_order():
    texts = [("a", "red fish"), ("b", "blue fish"), ("c", "red red wine"), ("d", "red fish")]
    index = SearchIndex(texts)
    assert [key for key, _ in index.best("red fish", 4)][:2] == ["a", "d"]
    assert index.best("wine", 9) == [("c", "red red wine")]
    assert index.best("nothing here", 3) == []


def test_search_by_key(tmp_path: Path):
    box = ToolRegistry([search_tool(documents={"New York": "big", "Huế": "old"}, mode="key")])
    assert called(box, "search", query=" new  YORK ").result == "big"
    assert called(box, "search", query="Rome").result == "Nothing was found."
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"title": "a", "text": "b"}\n\n{"title": "c"}\n')
    with pytest.raises(UserError, match="line 3 is no object with `title` and `text`"):
        search_tool(path=str(rows))
    with pytest.raises(UserError, match="cannot be read"):
        search_tool(path=str(tmp_path / "gone.jsonl"))


def test_python_shows_output_value_and_traceback_and_is_held_to_its_limits():
    box = ToolRegistry([python_tool(wall_s=5.0)], max_tool_response_length=4000)
    assert called(box, "python", code="print('a')\n6*7").result == "a\n42"
    assert called(box, "python", code="x = 1").result == "(no output)"
    wrong = called(box, "python", code="print(1)\n1/0")
    assert wrong.status == CallStatus.OK
    assert wrong.result.startswith("1\n")
    assert wrong.result.endswith("ZeroDivisionError: division by zero")
    short = ToolRegistry([python_tool(wall_s=1.0)])
    late = called(short, "python", code="while True: pass")
    assert late.status == CallStatus.FAILED
    assert late.result.startswith("Error: the program was ended: it went over its limit of ")
    with pytest.raises(UserError, match="did you mean `wall_s`"):
        python_tool(wal_s=3)


def test_a_collection_that_is_no_file_is_not_read(tmp_path: Path):
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    for path in ("/dev/zero", str(tmp_path), str(tmp_path / "deep.jsonl")):
        with pytest.raises(UserError, match=r"config\.path"):
            search_tool(path=path)
    listed: Any = ["a text"]
    with pytest.raises(UserError, match=r"config\.documents"):
        search_tool(documents=listed)
