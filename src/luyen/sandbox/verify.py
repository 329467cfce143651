"""Programs judged by tests: code with assertions, or input and the output it must give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeAlias, final

from luyen.sandbox.limits import Limits
from luyen.sandbox.python import Ran, run_python

_SHOWN = 200


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


Test: TypeAlias = str | Case
"""Code that raises when the program is wrong, run after it in the same names; or a case."""


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
    """Run a program once for every test, each time anew, one after the other.

    What is not run after `total_s` seconds, or after a failure where that is asked for, counts as
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
    return Verdict(passed=passed, total=len(tests), failures=tuple(failures))


async def failure_of(program: str, test: Test, limits: Limits) -> str | None:
    """Why a program fails a test, in one line; None when it passes."""
    if isinstance(test, str):
        ran = await run_python(program, then=test, limits=limits)
        return None if ran.finished and ran.exit_code == 0 else _reason(ran)
    ran = await run_python(program, stdin=test.stdin, limits=limits)
    if ran.exit_code != 0:
        return _reason(ran)
    if plain(ran.stdout) == plain(test.stdout):
        return None
    return f"printed {ran.stdout[:_SHOWN]!r}, expected {test.stdout[:_SHOWN]!r}"


def plain(text: str) -> str:
    """Text as outputs are compared: no blanks at the ends of lines, no empty lines at the end.

    Example:
        >>> plain("1 \\r\\n2\\n\\n") == plain("1\\n2")
        True
    """
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _reason(ran: Ran) -> str:
    if ran.killed_for is not None:
        return f"killed for {ran.killed_for}"
    last = ran.stderr.strip().rpartition("\n")[2][:_SHOWN]
    if ran.exit_code == 0:
        return "it ended before the test did"
    return last or f"exit code {ran.exit_code}"
