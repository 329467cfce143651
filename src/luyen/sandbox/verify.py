"""Programs judged by tests: input and the output it must give, calls and what they must return.

What a test expects never enters the sandbox, and the comparison is made outside, where the program
cannot reach it. Assertions are taken apart to that end; those that cannot be are `forgeable`.
"""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeAlias, final

from luyen.sandbox.assertions import SplitTest, is_true, take_apart
from luyen.sandbox.child import program as data
from luyen.sandbox.launch import Limits
from luyen.sandbox.python import ProgramResult, Step, run_python

_SHOWN = 200
_ODD = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""What a comparison of plain data can raise."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Standard input and what the program must print for it.

    Example:
        >>> Case(stdin="2 3", stdout="5").stdout
        '5'
    """

    stdin: str
    """What the program reads."""
    stdout: str
    """What it must print; blanks at the ends of lines and empty lines at the end do not count."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """A call of a function, or of a method of the class `Solution`, and what it must return.

    Example:
        >>> CallCase(function="add", arguments="[1, 2]", accepted=(3,)).accepted
        (3,)
    """

    function: str
    """Its name."""
    arguments: str
    """The positional arguments, a list written as JSON."""
    accepted: tuple[Any, ...]
    """Each of them is right; JSON data, so that tuples count as lists."""


Test: TypeAlias = str | Case | CallCase
"""Code with assertions about the program, run after it in the same names; or a case."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests say about a program.

    Example:
        >>> Verdict(passed=1, total=2, failures=("test 1: AssertionError",)).share
        0.5
    """

    passed: int
    """Tests that it passed."""
    total: int
    """Tests that there are."""
    failures: tuple[str, ...] = ()
    """One line for each test that it failed, as far as they were run."""
    forgeable: int = 0
    """Tests whose verdict the program could have forged, passed or not."""

    @property
    def share(self) -> float:
        """Tests passed, of all."""
        return self.passed / self.total


async def verify(
    program: str,
    tests: Sequence[Test],
    limits: Limits | None = None,
    *,
    total_s: float | None = None,
    stop_at_failure: bool = False,
) -> Verdict:
    """Run a program once for every test, each in a fresh process, one after the other.

    What is not run after `total_s` seconds, or after a failure with `stop_at_failure`, counts as
    not passed. A SandboxFault says that the sandbox failed; a failing program never raises.
    """
    assert tests, "without tests there is nothing to pass"
    limits = limits or Limits()
    deadline = None if total_s is None else monotonic() + total_s
    passed, failures = 0, list[str]()
    for number, test in enumerate(tests):
        left = limits.wall_s if deadline is None else min(limits.wall_s, deadline - monotonic())
        if left <= 0:
            failures.append(f"test {number}: not run, the time for all tests was up")
            break
        why = await failure_of(program, test, replace(limits, wall_s=left))
        passed += why is None
        if why is not None:
            failures.append(f"test {number}: {why}")
            if stop_at_failure:
                break
    return Verdict(
        passed=passed,
        total=len(tests),
        failures=tuple(failures),
        forgeable=sum(map(is_forgeable, tests)),
    )


def is_forgeable(test: Test) -> bool:
    """Whether a program can make a test pass without computing what it demands.

    Example:
        >>> is_forgeable("assert add(1, 2) == 3"), is_forgeable("assert_same(add(1, 2), 3)")
        (False, True)
    """
    return isinstance(test, str) and take_apart(test) is None


async def failure_of(program: str, test: Test, limits: Limits) -> str | None:
    """Why a program fails a test, in one line; None when it passes."""
    if isinstance(test, Case):
        ran = await run_python(program, stdin=test.stdin, limits=limits)
        if ran.exit_code != 0 or ran.killed_for is not None:
            return _reason(ran)
        if plain(ran.stdout) == plain(test.stdout):
            return None
        return f"printed {ran.stdout[:_SHOWN]!r}, expected {test.stdout[:_SHOWN]!r}"
    if isinstance(test, CallCase):
        call = _CALL.format(name=test.function, arguments=test.arguments)
        ran = await run_python(program, steps=[Step(code=call, is_value=True)], limits=limits)
        return _reason(ran) if _is_cut(ran, 1) else _result_failure(ran.values[0], test.accepted)
    judged = take_apart(test)
    if judged is None:
        ran = await run_python(program, steps=[Step(code=test)], limits=limits)
        return _reason(ran) if _is_cut(ran, 0) or not ran.finished else None
    ran = await run_python(program, steps=judged.steps, limits=limits)
    if _is_cut(ran, sum(step.is_value for step in judged.steps)) or not ran.finished:
        return _reason(ran)
    return _check_failure(judged, ran.values)


_CALL = """
(lambda owner: getattr(owner(), {name!r}) if hasattr(owner, {name!r}) else globals()[{name!r}])(
    globals().get("Solution")
)(*__import__("json").loads({arguments!r}))
"""


def _is_cut(ran: ProgramResult, values: int) -> bool:
    """Whether a program did not come to the end, or sent another number of values."""
    return ran.exit_code != 0 or ran.killed_for is not None or len(ran.values) != values


def _result_failure(line: str, accepted: tuple[Any, ...]) -> str | None:
    try:
        found = json.loads(json.dumps(data.read_plain(line)))
    except (data.NotPlain, TypeError, ValueError, RecursionError) as fault:
        return f"it returned {fault}, which is no JSON data"[:_SHOWN]
    if any(found == one for one in accepted):
        return None
    return f"returned {_shown(found)}, expected {_shown(accepted[0])}"


def _check_failure(judged: SplitTest, lines: Sequence[str]) -> str | None:
    try:
        values = {f"value_{i}": data.read_plain(line) for i, line in enumerate(lines)}
        wrong = next((c for c in judged.checks if not is_true(c, values)), None)
    except data.NotPlain as fault:
        return f"it returned {fault}, which is no plain data"[:_SHOWN]
    except _ODD as fault:
        return f"{type(fault).__name__}: {fault}"[:_SHOWN]
    if wrong is None:
        return None
    calls = [step.code for step in judged.steps if step.is_value]
    used = [name for name in values if name in ast.unparse(wrong)]
    got = "; ".join(f"{name} = {calls[int(name[6:])]} = {_shown(values[name])}" for name in used)
    where = f" where {got}" if got else ""
    return f"AssertionError: {ast.unparse(wrong)[:_SHOWN]}{where}"[: 2 * _SHOWN]


def _shown(value: Any) -> str:
    """The beginning of a value; a number may have more digits than Python will write."""
    try:
        return repr(value)[:_SHOWN]
    except ValueError:
        return "a number of thousands of digits"


def plain(text: str) -> str:
    """Text as outputs are compared: no blanks at the ends of lines, no empty lines at the end.

    Example:
        >>> plain("1 \\r\\n2\\n\\n") == plain("1\\n2")
        True
    """
    lines = text.rstrip().replace("\r\n", "\n").split("\n")  # and at nothing else that breaks lines
    return "\n".join(line.rstrip() for line in lines)


def _reason(ran: ProgramResult) -> str:
    if ran.killed_for is not None:
        return f"killed for {ran.killed_for}"
    last = ran.stderr.strip().rpartition("\n")[2][:_SHOWN]
    if ran.exit_code == 0:
        early = "it ended before the test did"
        return early if not ran.finished else "it wrote into the channel of its values"
    return last or f"exit code {ran.exit_code}"
