"""Programs against tests: what passes, what fails, and what cannot be fooled by leaving early."""

import asyncio
import json

import pytest

from luyen.rewards.rules import code as rule
from luyen.rewards.rules.rule import Unscorable
from luyen.sandbox.launch import Limits, SandboxFault
from luyen.sandbox.verify import Case, Verdict, verify
from tests.unit.rewards.builders import answer, config, prompt, scores

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"


def verdict(program: str, *tests: str | Case, **more) -> Verdict:
    return asyncio.run(verify(program, tests, Limits(cpu_s=1, wall_s=60.0), **more))


def test_assertions_see_the_names_of_the_program():
    assert verdict(ADD, "assert add(1, 2) == 3", "x = add(2, 2)\nassert x == 4").passed == 2


def test_cases_compare_what_is_printed():
    cases = (Case(stdin="1 2", stdout="3"), Case(stdin="2 2\n", stdout="4 \n\n"))
    assert verdict(SUM, *cases) == Verdict(passed=2, total=2)
    failed = verdict(SUM, Case(stdin="1 2", stdout="4"), cases[0])
    assert (failed.passed, failed.total) == (1, 2)
    assert failed.failures == ("test 0: printed '3\\n', expected '4'",)


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        (
            "def add(a, b):\n    return a - b",
            "AssertionError: value_0 == 3 where value_0 = add(1, 2) = -1",
        ),
        (
            "def add(a, b): return",
            "AssertionError: value_0 == 3 where value_0 = add(1, 2) = None",
        ),
        ("def add(a, b)", "SyntaxError: expected ':'"),
        ("", "NameError: name 'add' is not defined"),
        ("import sys\nsys.exit(0)", "it ended before the test did"),
        ("import os\nos._exit(0)", "it ended before the test did"),
        ("def add(a, b): raise SystemExit", "it ended before the test did"),
        ("import os\ndef add(a, b): os.kill(os.getpid(), 9)", "exit code -9"),
        ("while True: pass", "killed for cpu"),
        ("x = 'x' * 2**40", "MemoryError"),
    ],
)
def test_a_program_that_fails_is_told_why(program, failure):
    assert verdict(program, "assert add(1, 2) == 3").failures == (f"test 0: {failure}",)


def test_a_program_for_assertions_is_not_the_main_module():
    guarded = f"{ADD}\nif __name__ == '__main__':\n    raise SystemExit(1)\n"
    assert verdict(guarded, "assert add(1, 2) == 3").passed == 1


def test_every_test_begins_anew():
    assert verdict("seen = []", *["seen.append(1)\nassert seen == [1]"] * 2).passed == 2


def test_tests_can_stop_at_a_failure_and_at_the_end_of_the_time():
    tests = ("assert 0", "assert 1", "assert 1")
    assert verdict("", *tests, stop_at_failure=True) == Verdict(
        passed=0, total=3, failures=("test 0: AssertionError: 0",)
    )
    late = verdict("import time\ntime.sleep(60)", *tests, total_s=0.5)
    assert (late.passed, late.total) == (0, 3)
    assert late.failures[0] == "test 0: killed for time"
    assert late.failures[-1].endswith("the time for all tests was up")


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        ("assert f() == 1", ["assert f() == 1"]),
        (["assert 1", "assert 2"], ["assert 1", "assert 2"]),
        ({"inputs": ["1"], "outputs": [["2", 3]]}, [Case(stdin="1", stdout="2\n3")]),
        ([{"input": "1", "output": 2}], [Case(stdin="1", stdout="2")]),
        (json.dumps(["assert 1"]), ["assert 1"]),
        (json.dumps({"inputs": ["1"], "outputs": ["2"]}), [Case(stdin="1", stdout="2")]),
    ],
)
def test_tests_are_read_in_the_forms_that_data_has(truth, tests):
    assert rule.tests_of(truth) == tests


@pytest.mark.parametrize(
    "truth",
    ["", [], 5, [5], {}, {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}, {"fn_name": "f"}],
)
def test_a_row_without_usable_tests_cannot_be_judged(truth):
    with pytest.raises(Unscorable):
        rule.tests_of(truth)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("so ```py\nx = 1\n\ny = 2\n``` end", "x = 1\n\ny = 2"),
        ("```python\nx = 1\n```\nno:\n```python\nx = 2\n```\n", "x = 2"),
        ("```python\nx = 1", "x = 1"),
    ],
)
def test_the_last_fenced_block_is_the_program(text, program):
    assert rule.program_in(text) == program


def test_the_rule_scores_all_or_the_share():
    asked = prompt(["assert add(1, 2) == 3", "assert add(1, -2) == 3"])
    assert rule.code(asked, answer(ADD)).value == 0.0
    assert rule.code(asked, answer(ADD), credit="share").value == 0.5
    assert rule.code(prompt(["assert add(1, 2) == 3"]), answer(ADD)).value == 1.0
    with pytest.raises(Unscorable, match="neither all nor share"):
        rule.code(asked, answer(ADD), credit="some")


def test_the_rule_says_which_share_of_its_tests_could_be_forged():
    tests = ["assert add(1, 2) == 3", "for i in range(3):\n    assert add(i, 0) == i"]
    found = rule.code(prompt(tests), answer(ADD))
    assert (found.value, found.flat()["code/forgeable"]) == (1.0, 0.5)
    with pytest.raises(Unscorable, match="test 1 is scored inside the program's process"):
        rule.code(prompt(tests), answer(ADD), refuse_forgeable=True)
    assert rule.code(prompt(tests[:1]), answer(ADD), refuse_forgeable=True).value == 1.0


def test_a_failure_of_the_sandbox_is_a_fault_and_no_zero(monkeypatch):
    async def broken(*_, **__):
        raise SandboxFault("no guard")

    monkeypatch.setattr(rule, "verify", broken)
    with pytest.raises(Unscorable, match="the sandbox failed: no guard"):
        rule.code(prompt(["assert 1"]), answer(""))


def test_a_program_that_never_ends_is_wrong_and_no_fault():
    settings = config(
        components={"code": {"rule": "code", "kwargs": {"credit": "share", "cpu_s": 30}}},
        num_workers=1,
        timeout_s=6.0,
    )
    asked = prompt(["assert add(1, 2) == 3", "assert add(2, 2) == 4"], "mine")
    found = scores(settings, asked, ADD, "while True: pass", "while True: print(1)")
    assert [score.value for score in found] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("10**12", "assert list(range(f(3))) == [0, 1, 2]"),
        ("10**12", "assert max(range(f(3))) == 2"),
        ("'x'", "assert f(3) in range(10**11)"),
        ("10**11", "assert len(bytes(f(3))) == 3"),
        ("-10**9", "assert round(10, f(2)) == 4"),
        ("__import__('fractions').Fraction(3**300_000, 7)", "assert f(2) ** 900 == 16"),
        ("__import__('fractions').Fraction(10**5000, 3)", "assert f(2) ** 2 == 16"),
        ("10**100_000", "assert f(2) == 4"),
    ],
)
def test_no_value_makes_the_judge_itself_slow_or_break(value, test):
    verdict = asyncio.run(verify(f"def f(x): return {value}", [test]))
    assert verdict.passed == 0
    assert len(verdict.failures) == 1


def test_ranges_are_compared_as_python_does():
    tests = ["assert f(3) in range(10**11)", "assert list(range(f(3))) == [0, 1, 2]"]
    assert asyncio.run(verify("def f(x): return x", tests)).passed == 2
    assert asyncio.run(verify("def f(x): return 3.0", tests[:1])).passed == 1


@pytest.mark.parametrize("mark", ["\x0c", "\x0b", "\x1c", "\x85", "\u2028", "\r"])
def test_only_line_breaks_break_lines(mark):
    assert verdict(f"print({f'1{mark}2'!r})", Case(stdin="", stdout="1\n2")).passed == 0
