"""math-verify and reasoning-gym: right answers, hostile ones, other threads, hangs."""

import os
import threading
from time import perf_counter

import pytest

from luyen.rewards.build import build_reward
from luyen.rewards.rules.answers import math_equal, reasoning_gym, task_of
from luyen.rewards.rules.rule import Unscorable
from tests.optional import needs
from tests.unit.rewards.builders import answer, config, group, prompt, scores

CASES = [
    (r"\frac{1}{2}", "The answer is 0.5", 1.0),
    (r"\frac{1}{2}", r"\boxed{\frac12}", 1.0),
    (r"\frac{1}{2}", "$1/3$", 0.0),
    ("-3", "$-3$", 1.0),
    ("-3", "3", 0.0),
    ("1,234", "1234", 1.0),
    ("x+1", r"\boxed{1+x}", 1.0),
    (r"\{1, 2\}", r"$\{2, 1\}$", 1.0),
    (r"\boxed{12}", "so $12$", 1.0),
    ("12", "", 0.0),
    ("12", "no idea", 0.0),
    ("12", "١٢", 0.0),
    ("12", r"\boxed{", 0.0),
    ("12", "9" * 5_000, 0.0),
    (["11", "12"], "12", 1.0),
    ("3", r"\boxed{3}, not 5", 1.0),
    ("3", r"First \boxed{2}. Check: 7. So \boxed{3}.", 1.0),
    ("2", r"First \boxed{2}. Check: 7. So \boxed{3}.", 0.0),
    ("073", r"\boxed{73}", 1.0),
    (r"\frac{3}{4}", r"\boxed{\dfrac{3}{4}}", 1.0),
    (r"\sqrt{2}", r"\boxed{2^{1/2}}", 1.0),
    ("(1,2)", r"\boxed{\left(1, 2\right)}", 1.0),
    ("(1,2)", r"\boxed{(2,1)}", 0.0),
    ("[0,1)", r"\boxed{[0, 1]}", 0.0),
    ("5", r"\boxed{x = 5}", 1.0),
    (r"\pi", "$3.14159$", 0.0),
    ("12", r"\boxed{}", 0.0),
]


@needs("math_verify")
@pytest.mark.parametrize(("truth", "text", "value"), CASES)
def test_math_compares_what_is_meant(truth, text, value):
    assert math_equal(prompt(truth), answer(text)) == value


@needs("math_verify")
def test_math_judges_alike_off_the_main_thread():
    found: list[float] = []

    def judge() -> None:
        found.extend(math_equal(prompt(truth), answer(text)) for truth, text, _ in CASES)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert found == [value for _, _, value in CASES]


@needs("math_verify")
def test_a_truth_that_is_no_mathematics_cannot_judge():
    with pytest.raises(Unscorable, match="no mathematical expression"):
        math_equal(prompt(""), answer("12"))


@needs("math_verify")
def test_an_answer_that_hangs_the_verifier_is_wrong_and_costs_no_other_its_score():
    bomb = r"\boxed{9^{9^{9^{9^{9}}}}}"
    groups = [group(prompt("12", "math_x"), "12", bomb, "13")]
    start = perf_counter()
    with build_reward(config(timeout_s=1.0, num_workers=1), max_response_length=16) as reward:
        [done] = reward.score(groups)
        again = reward.score([group(prompt("12", "math_x"), "12")])
        pids = reward.pids
        counted = reward.take_counts()
    assert [score.value for score in done.scores] == [1.0, 0.0, 0.0]
    assert counted == {"judging/unjudgeable/math": 1.0}
    assert again[0].scores[0].value == 1.0
    assert perf_counter() - start < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ENTRY = {"question": "4 * 1", "answer": "4", "metadata": {"source_dataset": "products"}}


@needs("reasoning_gym")
@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 1.0), ("so <answer>4</answer>", 1.0), ("5", 0.0), ("", 0.0), ("<answer>", 0.0)],
)
def test_reasoning_gym_asks_the_verifier_of_the_task(text, value):
    asked = prompt(
        "4", "reasoning_gym/products", reasoning_gym={"dataset": "products", "entry": ENTRY}
    )
    assert reasoning_gym(asked, answer(text)) == value


@needs("reasoning_gym")
def test_a_row_without_its_task_or_with_an_unknown_one_cannot_be_judged():
    with pytest.raises(Unscorable, match=r"extra_info\[.reasoning_gym.\]"):
        task_of(prompt("4", "reasoning_gym/products"))
    asked = prompt("4", reasoning_gym={"dataset": "prodcts", "entry": ENTRY})
    with pytest.raises(Unscorable, match="did you mean `products`"):
        reasoning_gym(asked, answer("4"))


@needs("reasoning_gym")
def test_a_row_of_reasoning_gym_is_routed_to_its_verifier():
    task = {"dataset": "products", "entry": ENTRY}
    asked = prompt("4", "reasoning_gym/products", reasoning_gym=task)
    found = scores(config(num_workers=1), asked, "4", "7")
    assert [score.flat() for score in found] == [
        {"reward": 1.0, "reward/reasoning_gym": 1.0},
        {"reward": 0.0, "reward/reasoning_gym": 0.0},
    ]
