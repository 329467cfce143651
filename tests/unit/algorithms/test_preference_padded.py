"""Preference losses of padded rows: by hand, marked answers, and what the door refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.algorithms import padded
from luyen.base.errors import UserError

LOG2, NAN = math.log(2.0), math.nan


def t(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


CHOSEN, CHOSEN_MASK = t([-LOG2, -LOG2, NAN]), t([1, 1, 0])
REJECTED, REJECTED_MASK = t([NAN, -4 * LOG2]), t([0, 1])
REFERENCE = {
    "ref_chosen_logp": t([-3 * LOG2, -LOG2, NAN]),
    "ref_rejected_logp": t([NAN, -2 * LOG2]),
}


def loss_of(name: str | list[str], **given: Any) -> float:
    loss, _ = padded.preference_loss(
        name, CHOSEN, REJECTED, CHOSEN_MASK, REJECTED_MASK, **(REFERENCE | given)
    )
    return loss.item()


def test_a_pair_by_hand():
    # Log-ratios are 2 log 2 and -2 log 2, so that βΔ = log 4 at β = ½.
    assert loss_of("sigmoid", beta=0.5) == pytest.approx(math.log(5 / 4))
    assert loss_of(["sigmoid", "sft"], beta=0.5) == pytest.approx(math.log(5 / 4) + LOG2)
    mixed = loss_of(["sigmoid", "sft"], beta=0.5, loss_weights=[2.0, 0.5])
    assert mixed == pytest.approx(2 * math.log(5 / 4) + LOG2 / 2)
    assert loss_of("sigmoid", beta=0.5, margins=torch.tensor([2 * LOG2])) == pytest.approx(LOG2)
    # One token is shared: the second of the chosen answer, whose log-ratio is 0, counts nothing.
    assert loss_of("sigmoid", beta=0.5, ld_alpha=0.0) == pytest.approx(math.log(5 / 4))
    assert loss_of("ipo", beta=0.5) == pytest.approx((3 * LOG2 - 1) ** 2)
    assert loss_of("orpo", beta=0.5) == pytest.approx(LOG2 + 0.5 * math.log(16 / 15))


def test_gradients_reach_trainable_tokens_only():
    chosen = CHOSEN.clone().requires_grad_()
    loss, metrics = padded.preference_loss(
        "sigmoid", chosen, REJECTED, CHOSEN_MASK, REJECTED_MASK, **REFERENCE, beta=0.5
    )
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert gradient.tolist()[0] == pytest.approx([-0.1, -0.1, 0.0])
    assert metrics["preference/accuracy"] == 1.0


def test_marked_answers_by_hand():
    logp, mask = t([-LOG2, NAN], [-LOG2, 0.0]), t([1, 0], [1, 1])
    ref = t([-3 * LOG2, NAN], [-4 * LOG2, -LOG2])
    good = torch.tensor([1, 0])
    loss, metrics = padded.unpaired_preference_loss(
        "kto",
        logp,
        ref,
        mask,
        good,
        mismatched_logp=t([-LOG2]),
        ref_mismatched_logp=t([-3 * LOG2]),
        mismatched_mask=t([1]),
        beta=0.5,
    )
    assert loss.item() == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert metrics["preference/kl"] == pytest.approx(2 * LOG2)
    loss, _ = padded.unpaired_preference_loss("apo_zero_unpaired", logp, ref, mask, good, beta=0.5)
    assert loss.item() == pytest.approx((1 / 3 + 4 / 5) / 2)
    ratio = torch.tensor([9.0, 2.0])
    loss, _ = padded.unpaired_preference_loss(
        "bco", logp, ref, mask, good, density_ratio=ratio, beta=0.5
    )
    assert loss.item() == pytest.approx(1.5 * math.log1p(math.sqrt(2)))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("margins", {"margins": torch.tensor([1.0, 2.0])}),
        ("margins", {"margins": torch.tensor([NAN])}),
        ("ref_chosen_logp", {"ref_chosen_logp": t([0.0])}),
        ("ref_rejected_logp", {"ref_rejected_logp": t([0.0, NAN])}),
        ("ref_rejected", {"ref_rejected_logp": None}),
        ("ld_alpha", {"ld_alpha": -0.5}),
        ("preference.loss_weights", {"loss_weights": [1.0, 2.0]}),
        ("gamma", {"gamma": 1.0}),
    ],
)
def test_the_door_refuses_by_name(field: str, given: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        loss_of("sigmoid", **given)
    assert caught.value.field == field


def test_both_sides_have_one_row_per_pair():
    with pytest.raises(UserError) as caught:
        padded.preference_loss("cpo", CHOSEN, t([0.0], [0.0]), CHOSEN_MASK, t([1], [1]))
    assert caught.value.field == "rejected_mask"
