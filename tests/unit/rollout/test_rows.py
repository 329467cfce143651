"""Rows in the making: why they end, what they report, and where their keys are kept."""

import pytest
import torch

from luyen.base.errors import UserError
from luyen.models.attention import AttentionWindow
from luyen.rollout.native.kv_cache import DecodeContext, PromptWriter, SlottedCache
from luyen.rollout.native.sampler import NextTokens
from luyen.rollout.native.sequences import Row, RowTensors, append_tokens
from luyen.rollout.protocol import Request, Sampling
from tests.generation import spell


def row(**sampling) -> Row:
    asked = Sampling(**{"max_new_tokens": 40, **sampling})
    return Row(Request(id="a", tokens=(1, 2, 3), keys=(7, 1 << 63), sampling=asked), 1)


def grown(text: str, **sampling) -> list[str | None]:
    """Why the row ends after each letter."""
    one, reasons = row(**sampling), []
    for letter in text:
        one.append(ord(letter) - ord("a"), -1.0, 1.0)
        reasons.append(one.ending(spell))
    return reasons


def test_a_row_ends_at_its_budget():
    assert grown("abc", max_new_tokens=3) == [None, None, "length"]


def test_a_row_ends_at_a_stop_id_or_a_stop_string():
    assert grown("abc", stop_ids=frozenset({2})) == [None, None, "stop"]
    assert grown("xxabcab", stop_strings=("zz", "cab")) == [None] * 6 + ["stop"]
    assert (
        grown("abc", stop_ids=frozenset({0}), stop_strings=("b",), ignore_stop=True) == [None] * 3
    )


def test_a_long_answer_is_not_decoded_from_its_beginning():
    seen: list[int] = []

    def decode(tokens) -> str:
        seen.append(len(tokens))
        return spell(tokens)

    one = row(max_new_tokens=900, stop_strings=("yz",))
    for _ in range(300):
        one.append(0, -1.0, 1.0)
        assert one.ending(decode) is None
    one.append(24, -1.0, 1.0)
    assert one.ending(decode) is None
    one.append(25, -1.0, 1.0)
    assert one.ending(decode) == "stop"
    assert max(seen) <= 20


def test_a_completion_reports_kept_mass_only_where_something_was_ruled_out():
    for sampling, kept in (
        ({}, ()),
        ({"top_k": 3}, (0.5,)),
        ({"top_k": 3, "temperature": 0.0}, ()),
    ):
        one = row(**sampling)
        one.append(5, -0.25, 0.5)
        done = one.completion("aborted")
        assert (done.tokens, done.logps, done.kept_mass) == ((5,), (-0.25,), kept)
        assert (done.request, done.sample, done.reason) == ("a", 1, "aborted")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_draw_without_a_probability_is_an_error(bad: float):
    one = row()
    drawn = NextTokens(tokens=torch.tensor([0]), logps=torch.tensor([bad]), kept=None)
    with pytest.raises(UserError, match="the weights give the log-probability"):
        append_tokens([one], drawn)


def test_settings_of_rows_as_tensors():
    rows = [row(), row(temperature=0.0, top_k=2), row(temperature=0.5, top_p=0.5)]
    found = RowTensors.of(rows, vocabulary=9, device="cpu")
    assert found.keys.tolist() == [-(1 << 63)] * 3
    assert found.temperature.tolist() == [[1.0], [1.0], [0.5]]
    assert found.greedy.tolist() == [False, True, False]
    assert found.limits.top_k.tolist() == [[9], [9], [9]]
    assert found.limits.top_p.tolist() == [[1.0], [1.0], [0.5]]
    plain = RowTensors.of([row()], vocabulary=9, device="cpu")
    assert (plain.temperature, plain.greedy, plain.limits) == (None, None, None)


def test_a_prompt_is_written_into_every_row_of_its_samples():
    cache = SlottedCache(rows=4, length=10)
    keys, values = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    sink = PromptWriter(cache=cache, starts=(0, 2), lengths=(2, 3), rows=((1, 2), (2, 4)))
    sink.store(0, keys, values)
    cached, others = cache.layer(0, keys, values)
    assert torch.equal(cached[1, :, :2], keys[:2].transpose(0, 1))
    for line in (2, 3):
        assert torch.equal(cached[line, :, :3], keys[2:].transpose(0, 1))
        assert torch.equal(others[line, :, :3], values[2:].transpose(0, 1))
    assert cached[0].abs().max() == 0
    assert cached[:, :, 3:].abs().max() == 0


def test_moving_a_row_copies_its_tokens_in_every_layer():
    cache = SlottedCache(rows=3, length=10)
    fresh = torch.randn(4, 2, 3)
    for layer in (0, 1):
        sink = PromptWriter(cache=cache, starts=(0,), lengths=(4,), rows=((2, 3),))
        sink.store(layer, fresh + layer, fresh - layer)
    cache.move(2, 0, 3)
    for layer in (0, 1):
        keys, values = cache.layer(layer, fresh, fresh)
        assert torch.equal(keys[0, :, :3], (fresh[:3] + layer).transpose(0, 1))
        assert torch.equal(values[0, :, :3], (fresh[:3] - layer).transpose(0, 1))
        assert keys[0, :, 3:].abs().max() == 0


def test_decoding_appends_at_each_rows_own_position():
    cache = SlottedCache(rows=2, length=10)
    cache.layer(0, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    context = DecodeContext(cache=cache, positions=torch.tensor([0, 5]), span=cache.length)
    key, value = torch.ones(1, 1, 2, 2), torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    out = context.attend(0, torch.zeros(1, 2, 2, 2), key, value, 1.0, AttentionWindow())
    keys, _ = cache.layer(0, key[0], value[0])
    assert keys.sum((1, 3))[0].nonzero().tolist() == [[0]]
    assert keys.sum((1, 3))[1].nonzero().tolist() == [[5]]
    # Row 0 sees itself only; row 1 sees five empty keys and itself, all equally.
    assert torch.allclose(out[0, 0], torch.tensor([1.0, 2.0]))
    assert torch.allclose(out[0, 1], torch.tensor([3.0, 4.0]) / 6)
