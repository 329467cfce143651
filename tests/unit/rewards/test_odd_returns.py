"""Whatever a function of the user returns or does: a score, a clear error, or a named fault."""

import asyncio

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.rewards.calls import InlineExecutor
from luyen.rewards.custom import CustomReward
from tests.unit.rewards.builders import prompt, rollout
from tests.unit.rewards.odd_returns import FAULTS, HEAD, REFUSED, TAKEN


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A reward whose function evaluates the answer."""
    path = tmp_path_factory.mktemp("odd") / "odd.py"
    path.write_text(
        f"{HEAD}\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return eval(solution_str)\n"
    )
    return CustomReward(str(path), "compute_score", {}, executor=InlineExecutor(timeout_s=5.0))


def judged(odd: CustomReward, expression: str) -> Score:
    [score] = asyncio.run(odd(prompt("4", "mine"), [rollout(expression)]))
    return score


def test_the_tables_hold_more_than_a_hundred_cases():
    assert len(TAKEN) + len(REFUSED) + len(FAULTS) > 100


@pytest.mark.parametrize("expression", TAKEN)
def test_numbers_are_taken_and_are_plain_afterwards(odd, expression):
    score = judged(odd, expression)
    assert score.value == TAKEN[expression]
    assert {type(value) for value in score.flat().values()} == {float}
    assert {type(name) for name in score.flat()} == {str}
    assert "\ud800" not in "".join(score.flat())


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_no_score_is_refused_in_a_line_that_can_be_printed(odd, expression):
    with pytest.raises(UserError, match=r"odd\.py returned .*, which is no score") as caught:
        judged(odd, expression)
    said = str(caught.value)
    assert len(said) < 800
    said.encode()


@pytest.mark.parametrize("expression", FAULTS)
def test_what_it_raises_is_the_fault_of_one_rollout(odd, expression):
    score = judged(odd, expression)
    assert score.value is None
    assert (score.error or "").startswith(FAULTS[expression])
    assert judged(odd, "1").value == 1.0
