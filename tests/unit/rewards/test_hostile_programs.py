"""Answers that attack the rule `code`: each has a score, none is a fault, nothing is dropped."""

from time import process_time

import pytest

from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.rules.code import program_in
from tests.unit.rewards.builders import config, prompt, scores
from tests.unit.sandbox.test_forged_verdicts import FORGERIES


def test_every_hostile_answer_is_a_wrong_answer():
    settings = config(
        components={"code": {"rule": "code", "kwargs": {"credit": "share", "cpu_s": 3}}},
        num_workers=2,
        timeout_s=60.0,
    )
    asked = prompt(["assert secret(7) == 8675309", "assert False"], "mine")
    right = "def secret(x): return 8675309"
    found = scores(settings, asked, right, *FORGERIES.values())
    assert [score.error for score in found] == [None] * (1 + len(FORGERIES))
    assert [score.value for score in found] == [0.5] + [0.0] * len(FORGERIES)


def test_what_makes_the_judge_run_out_of_time_is_a_wrong_answer():
    assert rule_rewards.facts("code")["wrong"] == 0.0


def test_a_row_of_blanks_behind_a_fence_is_read_in_time_linear_in_it():
    began = process_time()
    for blanks in (" " * 200_000, "\t" * 200_000, "\n" + " " * 200_000):
        assert program_in(f"```{blanks}x") is not None
    assert program_in("```python3  \nx = 1\n  ```") == "x = 1"
    assert process_time() - began < 5
    began = process_time()
    for row in ("`" * 300_000, "```py " * 50_000, "```x\n" * 50_000, "x```\n" * 50_000):
        assert program_in(row) is not None
    assert process_time() - began < 10


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```py\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\r\ny = 2"),
        ('```py title="a.py"\nx = 1\n```', "x = 1"),
        ("```Python {1,2}\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nIt prints:\n```text\n1\n```\n", "x = 1"),
        ("```text\n```\n```python\nx = 1\n```", "x = 1"),
        ("1. So:\n   ```python\n   if x:\n     y()\n   ```\n", "if x:\n  y()"),
        ("````python\nx = '''\n```\n'''\n````\n", "x = '''\n```\n'''"),
        ("Use ``` for\n```python\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\n```\nx = 2", "x = 2"),
        ("```cpp\nint x;\n```", "```cpp\nint x;\n```"),
    ],
)
def test_the_program_of_an_answer_is_its_last_block_of_python(answer, program):
    assert program_in(answer) == program
