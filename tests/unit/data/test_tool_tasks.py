"""Tasks with tools: held-out rows, shares of calls, and conversations that are right or wrong."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.data.arithmetic_tasks import is_held_out
from luyen.data.sources import load_dataset
from luyen.data.tool_tasks import price_of, wrong_guess


def prompts(address: str) -> tuple[Prompt, ...]:
    return load_dataset([address]).prompts


def call_of(message: Message) -> Mapping[str, Any] | None:
    """What a message calls; None when it calls nothing."""
    calls = message.get("tool_calls")
    return calls[0]["function"] if calls else None


def names(prompt: Prompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools]


def test_a_question_has_its_product_as_ground_truth_and_offers_no_tool():
    for prompt in prompts("tools://calculator?size=100"):
        (message,) = prompt.messages
        a, b = map(int, message["content"].removesuffix("=").split("*"))
        assert [a, b] == prompt.extra_info["operands"]
        assert 100 <= min(a, b) <= max(a, b) <= 999
        assert prompt.ground_truth == str(a * b)
        assert prompt.data_source == "tools/calculator"
        assert prompt.tools == ()


def test_held_out_operands_are_never_trained_on():
    def pairs(address: str) -> set[tuple[int, ...]]:
        return {tuple(sorted(p.extra_info["operands"])) for p in prompts(address)}

    held = pairs("tools://calculator?split=held-out&seed=1")
    assert len(held) == 256
    assert all(is_held_out(a, b) for a, b in held)
    assert not held & pairs("tools://calculator?size=4000&traces=1&calls=0.5&seed=2")
    assert not held & pairs("arithmetic://product?digits=3&size=4000")


def test_a_call_passes_the_question_and_says_what_came_back():
    for prompt in prompts("tools://calculator?size=50&traces=2"):
        question, call, result, answer = prompt.messages
        a, b = prompt.extra_info["operands"]
        expression = question["content"].removesuffix("=")
        assert call_of(call) == {"name": "calculator", "arguments": {"expression": expression}}
        assert result["content"] == answer["content"] == str(a * b)
        assert names(prompt) == ["calculator"]


def test_a_guess_is_wrong_and_as_long_as_the_truth():
    guesses = prompts("tools://calculator?size=400&traces=2&calls=0")
    for prompt in guesses:
        _, answer = prompt.messages
        a, b = prompt.extra_info["operands"]
        assert answer["content"] != str(a * b)
        assert len(answer["content"]) == len(str(a * b))
    said = [prompt.messages[1]["content"] for prompt in guesses]
    assert sum(x != y for x, y in zip(said[::2], said[1::2], strict=True)) > 390


@pytest.mark.parametrize("truth", ["0", "7", "10", "99", "100", "998001"])
def test_a_wrong_guess_is_never_right(truth: str):
    guesses = {wrong_guess(truth, key) for key in range(300)}
    assert truth not in guesses
    assert {len(guess) for guess in guesses} == {len(truth)}
    assert {str(int(guess)) for guess in guesses} == guesses
    assert len(guesses) > 8


def test_shares_of_calls_and_of_bare_rows_are_as_asked():
    found = prompts("tools://calculator?size=2000&traces=2&calls=0.3&bare=0.2")
    bare = [prompt for prompt in found if not prompt.tools]
    offered = [prompt for prompt in found if prompt.tools]
    assert abs(len(bare) / 4000 - 0.2) < 0.02  # three standard deviations
    assert all(len(prompt.messages) == 2 for prompt in bare)
    calling = sum(len(prompt.messages) == 4 for prompt in offered)
    assert abs(calling / len(offered) - 0.3) < 0.025


def test_traces_depend_on_the_address_alone():
    address = "tools://calculator?size=64&traces=2&calls=0.5"
    assert prompts(address) == prompts(address)
    assert prompts(address)[:32] == prompts(address.replace("64", "16"))
    assert prompts(address) != prompts(address + "&seed=1")


def test_an_order_is_a_price_a_number_of_pieces_and_postage():
    for prompt in prompts("tools://orders?size=100"):
        item, pieces, postage = prompt.extra_info["order"]
        assert prompt.messages == ({"role": "user", "content": f"Price of {item}?"},)
        assert prompt.extra_info["follow_ups"] == [f"Total of {pieces}?", f"Plus {postage}?"]
        assert prompt.ground_truth == str(price_of(item) * pieces + postage)
        assert prompt.data_source == "tools/orders"


def test_held_out_items_are_never_trained_on():
    def items(address: str) -> set[str]:
        return {prompt.extra_info["order"][0] for prompt in prompts(address)}

    held = items("tools://orders?split=held-out&size=1000")
    train = items("tools://orders?size=4000&seed=5")
    assert len(held) > 300
    assert len(train) > 2000
    assert not held & train


def test_an_order_that_calls_every_time_comes_to_its_total():
    for prompt in prompts("tools://orders?size=50&traces=1"):
        item, pieces, postage = prompt.extra_info["order"]
        price = price_of(item)
        called = [call for message in prompt.messages if (call := call_of(message))]
        assert called == [
            {"name": "lookup", "arguments": {"item": item}},
            {"name": "calculator", "arguments": {"expression": f"{price}*{pieces}"}},
            {"name": "calculator", "arguments": {"expression": f"{price * pieces}+{postage}"}},
        ]
        assert prompt.messages[-1]["content"] == str(price * pieces + postage)
        assert [m["role"] for m in prompt.messages].count("user") == 3
        assert names(prompt) == ["lookup", "calculator"]


def test_an_order_that_guesses_goes_on_from_its_guess():
    found = prompts("tools://orders?size=600&traces=1&calls=0.5")
    share = sum(m["role"] == "tool" for p in found for m in p.messages) / 1800
    assert abs(share - 0.5) < 0.035
    for prompt in found:
        answers = [
            m["content"] for m in prompt.messages if m["role"] == "assistant" and m["content"]
        ]
        for call in filter(None, map(call_of, prompt.messages)):
            if call["name"] == "calculator":
                first = call["arguments"]["expression"].replace("+", "*").split("*")[0]
                assert first in answers


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tools://calculater", "did you mean `calculator`"),
        ("tools://calculator?call=1", "did you mean `calls`"),
        ("tools://calculator?calls=2", "is not between 0 and 1"),
        ("tools://orders?digits=2", "unknown key `digits`"),
        ("tools://orders?split=test", "is not a choice"),
    ],
)
def test_a_wrong_address_says_what_was_meant(address: str, said: str):
    with pytest.raises(UserError) as caught:
        load_dataset([address])
    assert said in str(caught.value)


def test_rows_are_plain_json():
    for address in ("tools://calculator?size=3&traces=1", "tools://orders?size=3"):
        for prompt in prompts(address):
            json.dumps([prompt.messages, prompt.tools, prompt.extra_info])


def test_both_tasks_stand_in_turn_with_their_own_shares():
    found = prompts("tools://both?size=600&seed=3&calls=0.3&bare=0.1&order_calls=0.6")
    assert [p.data_source for p in found[:4]] == [
        "tools/calculator",
        "tools/orders",
        "tools/orders",
        "tools/calculator",
    ]
    questions, orders = found[::3], [p for i, p in enumerate(found) if i % 3]
    assert list(questions) == list(
        prompts("tools://calculator?size=600&seed=3&calls=0.3&bare=0.1&traces=1")
    )
    assert orders == list(prompts("tools://orders?size=1200&seed=3&calls=0.6&traces=1"))


@pytest.mark.parametrize("digits", [1, 2])
def test_few_digits_give_every_pair_of_that_length(digits: int):
    least = 10 ** (digits - 1) if digits > 1 else 1
    train = prompts(f"tools://calculator?digits={digits}")
    held = prompts(f"tools://calculator?digits={digits}&split=held-out&size={_held(digits)}")
    operands = 10**digits - least
    assert len(train) + len(held) == operands * (operands + 1) // 2
    assert all(min(p.extra_info["operands"]) >= least for p in (*train, *held))


def _held(digits: int) -> int:
    operands = range(10 ** (digits - 1), 10**digits)
    return sum(is_held_out(a, b) for a in operands for b in operands if a <= b)
