"""The padded shell: what it accepts, what it refuses, and that it is the flat mathematics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.algorithms import padded
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators
from luyen.base.errors import UserError
from luyen.base.registry import Registry

NAN = math.nan


def t(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


MASK = t([1, 1, 0], [1, 0, 0])
LOGP = t([-1.0, -2.0, NAN], [-3.0, NAN, NAN])
ADV = t([1.0, 1.0, NAN], [-2.0, NAN, NAN])


def loss_of(name: str = "reinforce", mask: Tensor = MASK, **hparams: Any) -> float:
    return padded.policy_loss(name, LOGP, LOGP, ADV, mask, **hparams)[0].item()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (None, (1 + 2 - 6) / 3),
        ("token-mean", (1 + 2 - 6) / 3),
        ("token-sum", -3.0),
        ("seq-mean-token-sum", -1.5),
        ("seq-mean-token-mean", (1.5 - 6) / 2),
        ("seq-mean-token-sum-norm", -0.5),
    ],
)
def test_policy_loss_by_hand(aggregation: str | None, expected: float):
    assert loss_of(aggregation=aggregation) == pytest.approx(expected)


def test_the_fixed_length_is_the_padded_width_unless_it_is_given():
    mode = "seq-mean-token-sum-norm"
    assert loss_of(aggregation=mode, loss_scale_factor=6.0) == pytest.approx(-0.25)


def test_the_own_aggregation_of_a_loss_is_the_default():
    own, asked = loss_of("gspo"), loss_of("gspo", aggregation="token-mean")
    assert own == pytest.approx((-1.0 + 2.0) / 2)
    assert asked == pytest.approx((-2.0 + 2.0) / 3)


def test_metrics_are_floats():
    _, metrics = padded.policy_loss("vanilla", LOGP, LOGP - 0.5, ADV, MASK)
    assert metrics == {
        "actor/ppo_kl": pytest.approx(-0.5),
        "actor/pg_clipfrac": pytest.approx(2 / 3),
        "actor/pg_clipfrac_lower": 0.0,
    }
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16]
)
def test_a_mask_of_any_dtype_is_accepted(dtype: torch.dtype):
    assert loss_of(mask=MASK.to(dtype)) == pytest.approx(-1.0)


def test_correction_weights_multiply_the_loss():
    weights = t([2.0, 1.0, NAN], [0.0, NAN, NAN])
    assert loss_of(rollout_is_weights=weights) == pytest.approx((2 + 2) / 3)


def test_losses_that_choose_tokens_run_their_statistics_pass_on_the_batch():
    _, metrics = padded.policy_loss("kl_cov", LOGP, LOGP, ADV, MASK, kl_cov_ratio=0.34)
    assert metrics["actor/kl_cov_selected_fraction"] == pytest.approx(1 / 3)
    wide = {"clip_cov_ratio": 0.34, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    losses = {loss_of("clip_cov", seed=seed, **wide) for seed in range(20)}
    assert len(losses) > 1, "the seed decides which token leaves"
    assert loss_of("clip_cov", seed=3, **wide) == loss_of("clip_cov", seed=3, **wide)


def test_bypass_mode_reads_the_sampler():
    got = loss_of("bypass_mode", rollout_logp=LOGP - math.log(1.1))
    assert got == pytest.approx((-1.1 - 1.1 + 2.2) / 3)


def test_float32_and_bfloat16_losses_are_float32():
    for dtype in (torch.float32, torch.bfloat16):
        x, a = LOGP.to(dtype), ADV.to(dtype)
        loss, _ = padded.policy_loss("reinforce", x, x, a, MASK)
        assert loss.dtype is torch.float32
        assert loss.item() == pytest.approx(-1.0, rel=1e-2)


def test_value_loss_by_hand():
    values, old, returns = t([1.0, 2.0, NAN]), t([1.0, 0.0, NAN]), t([0.0, 2.0, NAN])
    loss, metrics = padded.value_loss(values, old, returns, t([1, 1, 0]), clip=0.5)
    assert loss.item() == pytest.approx((0.5 + 0.5 * 1.5**2) / 2)
    assert metrics == {"critic/vf_clipfrac": 0.5, "critic/vpred_mean": 1.5}
    free, _ = padded.value_loss(values, old, returns, t([1, 1, 0]), clip=None)
    assert free.item() == pytest.approx(0.25)
    summed, _ = padded.value_loss(
        values, old, returns, t([1, 1, 0]), clip=None, aggregation="token-sum"
    )
    assert summed.item() == pytest.approx(0.5)


def test_kl_by_hand():
    got = padded.kl("k2", t([0.0, -1.0]), t([-2.0, -1.0]))
    assert got.tolist() == [[2.0, 0.0]]
    logits = torch.tensor([[[0.0, 0.0], [1.0, 2.0]]], dtype=torch.float64)
    exact = padded.kl("full", logits, torch.zeros_like(logits))
    p = 1 / (1 + math.e)
    assert exact[0].tolist() == pytest.approx(
        [0.0, math.log(2.0) + p * math.log(p) + (1 - p) * math.log(1 - p)]
    )


def test_rollout_correction_returns_padded_weights_and_the_mask_that_stays():
    moved = t([math.log(4.0), 0.0, NAN], [-math.log(2.0), NAN, NAN])
    weights, keep, metrics = padded.rollout_correction(
        LOGP + moved,
        LOGP,
        MASK,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k2",
        rollout_rs_threshold=0.5,
    )
    assert weights.flatten().tolist() == pytest.approx([2.0, 1.0, 0.0, 0.5, 0.0, 0.0])
    assert keep.tolist() == [[False, True, False], [True, False, False]]
    assert all(type(value) is float for value in metrics.values())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[CreditInputs]:
    """Inputs that the estimator `probe` was called with; it returns rewards as advantages."""
    inputs: list[CreditInputs] = []

    def probe(given: CreditInputs, *, gain: float = 1.0) -> Credit:
        inputs.append(given)
        rewards = given.given_rewards()
        return Credit(advantages=gain * rewards, returns=rewards)

    fresh: Registry[Any] = Registry("advantage estimator", "algorithm.adv_estimator")
    fresh.register("probe")(probe)
    monkeypatch.setattr(padded, "adv_estimators", fresh)
    return inputs


def test_a_reward_per_row_stands_on_its_last_trainable_token(seen: list[CreditInputs]):
    mask = t([0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0])
    rewards = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    advantages, returns = padded.advantage("probe", rewards, mask, ["a", "b", "a"], gain=2.0)
    expected = [[0, 0, 0, 1, 0], [2, 0, 0, 0, 0], [0, 0, 0, 0, 3]]
    assert returns.tolist() == expected
    assert advantages.tolist() == [[2.0 * x for x in row] for row in expected]
    assert seen[0].sequence_rewards().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "groups", [["x", "y", "x"], torch.tensor([7, 3, 7]), (("p", 1), ("p", 2), ("p", 1))]
)
def test_groups_are_labels_of_any_kind(seen: list[CreditInputs], groups: Any):
    padded.advantage("probe", torch.zeros(3), torch.ones(3, 2), groups)
    assert seen[0].layout.groups.tolist() == [0, 1, 0]


def test_every_stream_reaches_the_estimator_flat(seen: list[CreditInputs]):
    streams = {
        name: torch.full((2, 3), value, dtype=torch.float64)
        for name, value in [
            ("values", 0.1),
            ("old_logp", -0.2),
            ("sum_pi_squared", 0.3),
            ("rollout_is_weights", 0.4),
        ]
    }
    row = torch.tensor([5.0, 6.0], dtype=torch.float64)
    padded.advantage(
        "probe",
        t([0, 1, NAN], [2, NAN, 7.0]),
        MASK,
        [0, 0],
        baselines=row,
        components={"accuracy": row},
        **streams,
    )
    (given,) = seen
    assert given.given_rewards().tolist() == [0.0, 1.0, 0.0, 2.0, 0.0, 7.0]
    assert given.positions is not None
    assert given.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert given.layout.mask.tolist() == [True, True, False, True, False, False]
    assert given.layout.offsets.tolist() == [0, 3, 6]
    flat = (given.values, given.old_logp, given.sum_pi_squared, given.is_weights)
    assert [None if x is None else x.tolist() for x in flat] == [
        [v] * 6 for v in (0.1, -0.2, 0.3, 0.4)
    ]
    assert given.baselines is row
    assert given.components is not None
    assert given.components["accuracy"] is row


@pytest.mark.usefixtures("seen")
def test_infinity_is_refused_even_on_a_masked_token_since_rewards_there_still_count():
    with pytest.raises(UserError, match="rewards = inf"):
        padded.advantage("probe", t([0, 1, math.inf], [2, NAN, NAN]), MASK, [0, 0])


def test_group_relative_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0], dtype=torch.float64)
    mask = torch.ones(4, 2)
    advantages, returns = padded.advantage("rloo", rewards, mask, ["a", "a", "b", "b"])
    assert advantages.tolist() == [[1.0, 1.0], [-1.0, -1.0], [4.0, 4.0], [-4.0, -4.0]]
    assert torch.equal(advantages, returns)
    assert "rloo" in adv_estimators
