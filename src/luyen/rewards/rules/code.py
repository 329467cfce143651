"""Programs, scored by running them against the row's tests: input and output, or calls."""

import ast
import asyncio
import json
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from luyen.base.records import Prompt, Score
from luyen.rewards.rules.rule import Answer, Unscorable, rule_rewards, truth_of
from luyen.sandbox.calls import seconds_left
from luyen.sandbox.launch import Limits, SandboxFault
from luyen.sandbox.verify import CallCase, Case, Test, is_forgeable, verify

# Function tests: arguments and the expected return value.


def call_test(name: str, arguments: Any, wanted: Any) -> CallCase:
    """A call of a function, or of a method of `Solution`, and what it must return.

    Arguments are a list, or text with one JSON value a line; tuples are lists. Where a result is
    written as a list of one, as some data sets do, its only entry is accepted too.

    Example:
        >>> call_test("add", [1, 2], [3]).accepted
        ([3], 3)
        >>> call_test("add", "1\\n2", "3").arguments
        '[1, 2]'
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise Unscorable(f"the row's fn_name {name[:100]!r} is no name of a function")
    given = _lines(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, list | tuple):
        raise Unscorable(f"the row's arguments {str(arguments)[:100]!r} are no list")
    one = _value(wanted) if isinstance(wanted, str) else wanted
    accepted = [one, one[0]] if isinstance(one, list | tuple) and len(one) == 1 else [one]
    if isinstance(wanted, str) and one != wanted:  # text that happens to look like JSON
        accepted.append(wanted)
    known = tuple(json.loads(_written(accepted)))
    return CallCase(function=name, arguments=_written(given), accepted=known)


def _written(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unscorable(f"the row's test is no JSON: {error}") from error


def _lines(text: str) -> list[Any]:
    return [_value(line) for line in text.split("\n") if line.strip()]


def _value(text: str) -> Any:
    """A value written as JSON; text that is no JSON stands for itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# What repeats is taken whole: a row of it, tried at every length, would take its length's square.
_OPENS = re.compile(
    r"(?P<before>^[ \t]*+)?(?<!`)(?P<fence>`{3,}+)(?P<info>[^`\n]*+)\n", re.MULTILINE
)
_PYTHON = re.compile(r"\s*(?i:(?:python[\d.]*|py)(?:[\s{,].*)?)?")
"""What stands behind the marks that open a block of Python: nothing, or `py title="a.py"`."""
_MARGIN_S = 1.0
"""What is left of the time for a score when the tests are stopped."""


@rule_rewards.register("code", isolated=True, wrong=0.0, door="luyen.sandbox.verify")
def code(
    prompt: Prompt,
    answer: Answer,
    *,
    credit: Literal["all", "share"] = "all",
    cpu_s: int = 2,
    memory_mb: int = 1024,
    refuse_forgeable: bool = False,
) -> Score:
    """1 when the program passes every test of the row, with `share` the part that it passes.

    The part `forgeable` is the share of tests whose verdict the program could have forged; with
    `refuse_forgeable` a row that has one cannot be scored.
    """
    if credit not in ("all", "share"):
        raise Unscorable(f"credit {credit!r} is neither all nor share")
    program, tests = program_in(answer.text), tests_of(truth_of(prompt))
    if refuse_forgeable and (number := first_forgeable(tests)) is not None:
        raise Unscorable(
            f"the row's test {number} is scored inside the program's process, which could forge "
            "its verdict, and sandbox.require asks for verdicts: write assert CALL == LITERAL, "
            "or cases"
        )
    limits = Limits(cpu_s=cpu_s, wall_s=5.0 * cpu_s, memory_bytes=memory_mb * 2**20)
    left = seconds_left()
    judged = verify(
        program,
        tests,
        limits,
        total_s=None if left is None else max(left - _MARGIN_S, left / 2),
        stop_at_failure=credit == "all",
    )
    try:
        verdict = asyncio.run(judged)
    except SandboxFault as fault:
        raise Unscorable(f"the sandbox failed: {fault}") from fault
    value = verdict.share if credit == "share" else float(verdict.passed == verdict.total)
    forgeable = Score(name="forgeable", value=verdict.forgeable / verdict.total, weight=0.0)
    return Score(name="code", value=value, parts=(forgeable,))


def first_forgeable(tests: Sequence[Test]) -> int | None:
    """Number of the first test whose verdict a program could forge, from 0."""
    return next((number for number, test in enumerate(tests) if is_forgeable(test)), None)


def program_in(text: str) -> str:
    """The last fenced block of Python, or of no language; an answer without one is taken whole.

    Example:
        >>> program_in("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```python\\nx = 2\\n```")
        'x = 2'
    """
    program, at = text, 0
    while opened := _OPENS.search(text, at):
        at, indent = opened.end(), opened["before"]
        is_python = _PYTHON.fullmatch(opened["info"]) is not None
        if not is_python and indent is None:
            continue
        closed = re.compile(rf"^[ \t]*+{opened['fence']}", re.MULTILINE).search(text, at)
        if is_python:
            lines = text[at : closed.start() if closed else len(text)]
            program = _outdented(lines, len(indent or "")).removesuffix("\n").removesuffix("\r")
        at = closed.end() if closed else len(text)
    return program


def _outdented(lines: str, width: int) -> str:
    """Lines of a block without the indentation of its fence."""
    return re.sub(rf"^[ \t]{{1,{width}}}", "", lines, flags=re.MULTILINE) if width else lines


def tests_of(truth: Any) -> list[Test]:
    """The tests of a row: assertions as text or a list of texts; cases as pairs of lists or a list.

    With an `fn_name`, pairs are arguments and the expected return value.

    Example:
        >>> tests_of(["assert add(1, 2) == 3"])
        ['assert add(1, 2) == 3']
        >>> tests_of('{"inputs": ["1 2"], "outputs": ["3"]}')
        [Case(stdin='1 2', stdout='3')]
    """
    given = _from_json(truth) if isinstance(truth, str) else truth
    if isinstance(given, Mapping):
        tests = _pairs(cast(Mapping[str, Any], given))
    elif isinstance(given, Sequence) and not isinstance(given, str):
        tests = [_one(test) for test in cast(Sequence[Any], given)]
    else:
        tests = [_one(given)]
    if not tests:
        raise Unscorable("the row has no tests")
    return tests


def _from_json(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict | list) else text


def _pairs(given: Mapping[str, Any]) -> list[Test]:
    name = given.get("fn_name")
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        return [_one(given)]
    if len(inputs) != len(outputs):
        raise Unscorable(f"the row has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(cast(Sequence[Any], inputs), cast(Sequence[Any], outputs), strict=True)
    if name is not None:
        return [call_test(str(name), arguments, wanted) for arguments, wanted in pairs]
    return [Case(stdin=_text(i), stdout=_text(o)) for i, o in pairs]


def _one(test: Any) -> Test:
    if isinstance(test, str) and test.strip():
        if not _can_fail(test):
            raise Unscorable(f"the row's test {test[:100]!r} asserts nothing: all would pass")
        return test
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        return Case(stdin=_text(test["input"]), stdout=_text(test["output"]))
    raise Unscorable(f"the row's test {str(test)[:100]!r} is neither code nor input and output")


def _can_fail(code: str) -> bool:
    """Whether code that is run asserts, raises or calls anything, outside of what it defines.

    Comments, data and functions that are never called would let every program pass.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backslash in a test
        try:
            left: list[ast.AST] = list(ast.parse(code).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Unscorable(f"the row's test {code[:100]!r} is no Python: {error}") from error
    while left:
        node = left.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Call):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return False


def _text(value: Any) -> str:
    """Input or output as text: lists are lines, as common data sets write them."""
    if isinstance(value, list | tuple):
        return "\n".join(map(str, cast(Sequence[Any], value)))
    return str(value)
