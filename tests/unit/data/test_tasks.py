"""Task sources: rows made from a seed; what is held out is never trained on."""

import random
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.data.arithmetic_tasks import is_held_out
from luyen.data.sources import load_dataset
from tests.optional import needs


def prompts(address: str) -> tuple[Prompt, ...]:
    return load_dataset([address]).prompts


def pairs(address: str) -> set[tuple[int, ...]]:
    return {tuple(sorted(p.extra_info["operands"])) for p in prompts(address)}


@pytest.mark.parametrize(
    ("name", "sign", "compute"),
    [
        ("sum", "+", lambda a, b: a + b),
        ("difference", "-", lambda a, b: a - b),
        ("product", "*", lambda a, b: a * b),
    ],
)
def test_the_ground_truth_is_the_result(name: str, sign: str, compute: Any):
    for prompt in prompts(f"arithmetic://{name}?size=200&digits=3"):
        (message,) = prompt.messages
        a, b = map(int, message["content"].removesuffix("=").split(sign))
        assert 0 <= a < 1000
        assert 0 <= b < 1000
        assert [a, b] == prompt.extra_info["operands"]
        assert prompt.ground_truth == str(compute(a, b))
        assert int(prompt.ground_truth) >= 0
        assert prompt.data_source == f"arithmetic/{name}"


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_no_pair_is_both_trained_on_and_held_out_in_either_order(digits: int):
    train = pairs(f"arithmetic://sum?digits={digits}&size={min(4000, 40**digits)}&seed=3")
    held = pairs(f"arithmetic://product?digits={digits}&split=held-out&seed=4")
    assert train
    assert held
    assert not train & held
    assert all(is_held_out(*pair) for pair in held)


def test_two_digits_have_5050_pairs_of_which_about_one_in_eight_is_held_out():
    held = sum(is_held_out(a, b) for a in range(100) for b in range(a, 100))
    assert abs(held - 5050 / 8) < 75  # three standard deviations of a fair draw
    assert len(pairs(f"arithmetic://sum?split=held-out&size={held}")) == held
    assert len(pairs(f"arithmetic://sum?size={5050 - held}")) == 5050 - held
    with pytest.raises(UserError, match=f"from 1 to {5050 - held}"):
        prompts("arithmetic://sum?size=5050")


@pytest.mark.parametrize("digits", [2, 5])
def test_no_pair_comes_twice_and_a_longer_list_begins_with_the_shorter(digits: int):
    few = prompts(f"arithmetic://sum?digits={digits}&size=50")
    many = prompts(f"arithmetic://sum?digits={digits}&size=500")
    assert many[:50] == few
    assert len(pairs(f"arithmetic://sum?digits={digits}&size=500")) == 500


def test_both_orders_of_operands_occur():
    firsts = [p.extra_info["operands"] for p in prompts("arithmetic://sum?size=400")]
    larger = sum(a > b for a, b in firsts)
    assert 140 < larger < 260  # 200 expected, standard deviation 10


def test_a_seed_changes_the_rows_and_nothing_else_does():
    assert prompts("arithmetic://sum?seed=1&size=64") == prompts("arithmetic://sum?size=64&seed=1")
    assert prompts("arithmetic://sum?seed=1&size=64") != prompts("arithmetic://sum?size=64")
    assert [p.messages[0]["content"] for p in prompts("arithmetic://sum?size=3")] == [
        "97+7=",
        "74+27=",
        prompts("arithmetic://sum")[2].messages[0]["content"],
    ]


def test_sizes_have_defaults():
    assert len(prompts("arithmetic://sum")) == 4096
    assert len(prompts("arithmetic://sum?split=held-out")) == 256
    assert (
        len(prompts("arithmetic://sum?digits=1"))
        + len(prompts("arithmetic://sum?digits=1&split=held-out"))
        == 55
    )


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("arithmetic://sun", "did you mean `sum`"),
        ("arithmetic://sum?digit=2", "did you mean `digits`"),
        ("arithmetic://sum?digits=0", "`digits=0` is no whole number from 1 to 9"),
        ("arithmetic://sum?digits=two", "is no whole number"),
        ("arithmetic://sum?seed=-1", "is no whole number"),
        ("arithmetic://sum?split=heldout", "did you mean `held-out`"),
        ("arithmetic://sum?digits=2&digits=3", "`digits` is given twice"),
        ("arithmetic://sum?digits=", "`digits` has no value"),
        *(
            pytest.param(address, said, marks=needs("reasoning_gym"))
            for address, said in (
                ("reasoning_gym://product", "did you mean `products`"),
                ("reasoning_gym://products?max_digit=1", "did you mean `max_digits`"),
                ("reasoning_gym://products?size=0", "`size=0` is no whole number"),
                ("reasoning_gym://products?min_terms=-3", "the task refuses its settings"),
            )
        ),
    ],
)
def test_a_wrong_address_says_what_was_meant(address: str, said: str):
    with pytest.raises(UserError) as caught:
        load_dataset([address])
    assert said in str(caught.value)
    assert caught.value.value == address


@needs("reasoning_gym")
def test_a_reasoning_gym_row_carries_what_the_verifier_needs():
    import reasoning_gym

    address = "reasoning_gym://products?size=5&seed=7&min_digits=1&max_digits=1"
    found = prompts(address)
    assert found == prompts(address)
    assert found != prompts(address.replace("seed=7", "seed=8"))
    for prompt in found:
        task = prompt.extra_info["reasoning_gym"]
        score = reasoning_gym.get_score_answer_fn(task["dataset"])
        assert prompt.data_source == "reasoning_gym/products"
        assert score(prompt.ground_truth, task["entry"]) == 1.0
        assert score("no", task["entry"]) < 1.0
        assert prompt.messages[0]["content"] == task["entry"]["question"]
        assert int(prompt.ground_truth) <= 81


@needs("reasoning_gym")
def test_values_of_an_address_are_numbers_lists_or_words():
    (prompt,) = prompts('reasoning_gym://basic_arithmetic?size=1&operators=["-"]&max_terms=2')
    assert "-" in prompt.messages[0]["content"]
    assert "+" not in prompt.messages[0]["content"]
    (word,) = prompts("reasoning_gym://basic_arithmetic?size=1&format_style=natural")
    assert word.ground_truth


@needs("reasoning_gym")
def test_a_task_that_draws_from_the_global_generator_repeats_and_leaves_it_alone():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    first = load_dataset(["reasoning_gym://list_functions?size=3"])
    assert random.random() == expected
    assert load_dataset(["reasoning_gym://list_functions?size=3"]).prompts == first.prompts
