"""Which tokens clip_cov and kl_cov choose."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from luyen.algorithms.policy_losses import PolicyInputs, loss_statistics, policy_losses
from luyen.algorithms.policy_losses.covariance import (
    covariance,
    scramble,
    shuffled_keys,
    token_keys,
)
from luyen.base.errors import UserError
from tests.unit.algorithms.batches import f64, layout_of, one_token


def chosen(name: str, inputs: PolicyInputs, seed: int = 0, **hparams: Any) -> list[bool]:
    return loss_statistics.get(name)(inputs, seed=seed, **hparams)["selected"].tolist()


def step(logp: list[float], advantages: list[float], *lengths: int) -> PolicyInputs:
    return PolicyInputs(
        logp=f64(*logp),
        old_logp=f64(*logp),
        advantages=f64(*advantages),
        layout=layout_of(*(lengths or (len(logp),))),
    )


def test_scramble_is_splitmix64():
    # the first outputs of SplitMix64 seeded with 0 and with 1234567, as published
    expected = [0xE220A8397B1DCDAF, 6457827717110365317]
    got = scramble(torch.tensor([0, 1234567]))
    assert [x % 2**64 for x in got.tolist()] == expected


def test_covariance_by_hand():
    inputs = step([-1.0, -3.0, -2.0], [1.0, 2.0, 3.0])
    assert covariance(inputs).tolist() == [-1.0, 0.0, 0.0]


def test_covariance_has_the_same_bits_in_any_order():
    logp = torch.randn(999, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = torch.randperm(999, generator=torch.Generator().manual_seed(2))
    plain = step(logp.tolist(), logp.sin().tolist(), *[1] * 999)
    turned = step(logp[order].tolist(), logp[order].sin().tolist(), *[1] * 999)
    assert torch.equal(covariance(plain)[order], covariance(turned))


def test_kl_cov_takes_the_share_with_the_largest_covariance():
    inputs = step([-1.0, -3.0, -1.0, -3.0], [2.0, -3.0, -1.0, 1.0])
    # means -2 and -1/4: covariances 2.25, 2.75, -0.75, -1.25
    assert chosen("kl_cov", inputs, kl_cov_ratio=0.25) == [False, True, False, False]
    assert chosen("kl_cov", inputs, kl_cov_ratio=0.5) == [True, True, False, False]
    assert chosen("kl_cov", inputs, kl_cov_ratio=0.74) == [True, True, False, False]


def test_at_least_one_token_is_chosen_however_small_the_share():
    inputs = step([-1.0, -3.0], [2.0, -2.0])
    assert sum(chosen("kl_cov", inputs, kl_cov_ratio=1e-6)) >= 1
    assert chosen("clip_cov", inputs, clip_cov_lb=1.5, clip_cov_ub=2.5).count(True) == 1


def test_clip_cov_chooses_only_between_the_bounds_and_not_what_ppo_clips_already():
    inputs = step([-1.0, -3.0, -1.0, -3.0], [2.0, -3.0, -1.0, 1.0])
    everything = {"clip_cov_ratio": 1.0, "clip_cov_lb": -1.0, "clip_cov_ub": 2.5}
    assert chosen("clip_cov", inputs, **everything) == [True, False, True, False]
    moved = replace(inputs, old_logp=inputs.old_logp - f64(0.5, 0.0, 0.0, 0.0))
    assert chosen("clip_cov", moved, **everything) == [False, False, True, False]
    assert chosen("clip_cov", moved, clip_ratio=0.9, **everything) == [True, False, True, False]


def test_clip_cov_chooses_nothing_when_nothing_is_eligible():
    assert chosen("clip_cov", step([-1.0, -2.0], [0.1, 0.2])) == [False, False]


def test_the_draw_of_clip_cov_depends_on_the_seed_alone_and_is_fair():
    logp = torch.linspace(-3.0, -1.0, 400, dtype=torch.float64)
    inputs = step(logp.tolist(), logp.sin().tolist())
    wide = {"clip_cov_ratio": 0.5, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    first = torch.tensor(chosen("clip_cov", inputs, seed=1, **wide))
    assert torch.equal(first, torch.tensor(chosen("clip_cov", inputs, seed=1, **wide)))
    second = torch.tensor(chosen("clip_cov", inputs, seed=2, **wide))
    assert int(first.sum()) == int(second.sum()) == 200
    assert 60 < int((first & second).sum()) < 140
    assert 60 < int(first[:200].sum()) < 140


def test_a_seed_of_any_size_is_accepted():
    keys = torch.tensor([1, 2])
    assert not torch.equal(shuffled_keys(keys, 2**63), shuffled_keys(keys, 2**63 + 1))
    assert torch.equal(shuffled_keys(keys, 2**64), shuffled_keys(keys, 0))


def test_keys_given_by_the_caller_are_used():
    inputs = replace(
        step([-1.0, -1.0], [1.0, 1.0]), statistics={"token_key": torch.tensor([11, 5])}
    )
    assert token_keys(inputs).tolist() == [11, 5]
    only = chosen("kl_cov", inputs, kl_cov_ratio=0.5)
    assert only == [False, True], "ties go to the smaller key"


def test_equal_tokens_of_different_sequences_have_different_keys():
    inputs = step([-1.0, -2.0, -1.0, -3.0], [1.0, 1.0, 1.0, 1.0], 2, 2)
    keys = token_keys(inputs).tolist()
    assert len(set(keys)) == 4


def test_keys_ignore_masked_tokens_and_the_place_in_the_step():
    inputs = step([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0], 2, 1)
    turned = PolicyInputs(
        logp=f64(-3.0, 8.0, -1.0, math.nan, -2.0),
        old_logp=f64(-3.0, 8.0, -1.0, 5.0, -2.0),
        advantages=f64(3.0, 8.0, 1.0, 5.0, 2.0),
        layout=layout_of(2, 3, mask=[True, False, True, False, True]),
    )
    a, b = token_keys(inputs), token_keys(turned)
    assert a.tolist() == b[[2, 4, 0]].tolist()


def test_sequences_that_are_the_same_in_every_number_are_chosen_together():
    inputs = step([-1.0, -3.0, -1.0, -3.0], [2.0, -2.0, 2.0, -2.0], 2, 2)
    twins = chosen("kl_cov", inputs, kl_cov_ratio=0.25)
    assert twins in ([True, False, True, False], [False, True, False, True])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_fully_masked_step_chooses_nothing(name: str):
    inputs = replace(step([-1.0], [1.0]), layout=layout_of(1, mask=[False]))
    assert chosen(name, inputs) == [False]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_loss_without_its_statistics_pass_is_refused(name: str):
    with pytest.raises(UserError, match=f"loss `{name}` chooses tokens over the whole step"):
        policy_losses.get(name)(one_token(-1.0, -1.0, 1.0))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_choice_on_a_masked_token_does_not_count(name: str):
    inputs = replace(
        one_token(-1.0, -1.0, 1.0, {"selected": torch.tensor([True])}),
        layout=layout_of(1, mask=[False]),
    )
    loss = policy_losses.get(name)(inputs)
    assert loss.metrics[f"actor/{name}_selected_fraction"].total.item() == 0.0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_share_outside_0_1_is_refused(name: str, share: float):
    with pytest.raises(UserError, match=f"{name}_ratio = .*: it is a share of the tokens"):
        chosen(name, one_token(-1.0, -1.0, 1.0), **{f"{name}_ratio": share})
