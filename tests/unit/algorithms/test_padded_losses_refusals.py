"""What the padded shell refuses, by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.algorithms import padded
from luyen.base.errors import UserError

X = torch.zeros(2, 3)
ONES = torch.ones(2, 3)
ROW = torch.zeros(2)


def holed(value: float = math.nan) -> Tensor:
    x = torch.zeros(2, 3)
    x[1, 2] = value
    return x


def loss(**changed: Any) -> Any:
    given: dict[str, Any] = {"logp": X, "old_logp": X, "advantages": X, "mask": ONES} | changed
    return padded.policy_loss("vanilla", **given)


def advantage(**changed: Any) -> Any:
    given: dict[str, Any] = {"rewards": ROW, "mask": ONES, "groups": [0, 0]} | changed
    return padded.advantage("grpo", **given)


def value(**changed: Any) -> Any:
    given: dict[str, Any] = {"values": X, "old_values": X, "returns": X, "mask": ONES} | changed
    return padded.value_loss(**given)


def correction(**changed: Any) -> Any:
    given: dict[str, Any] = {"old_logp": X, "rollout_logp": X, "mask": ONES} | changed
    return padded.rollout_correction(**given)


STREAMS: list[tuple[Callable[..., Any], str]] = [
    (loss, "logp"),
    (loss, "old_logp"),
    (loss, "advantages"),
    (loss, "rollout_logp"),
    (loss, "rollout_is_weights"),
    (advantage, "rewards"),
    (advantage, "values"),
    (advantage, "old_logp"),
    (advantage, "sum_pi_squared"),
    (advantage, "rollout_is_weights"),
    (value, "values"),
    (value, "old_values"),
    (value, "returns"),
    (correction, "old_logp"),
    (correction, "rollout_logp"),
]
every_stream = pytest.mark.parametrize(("call", "name"), STREAMS)


@every_stream
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_where_it_counts_is_refused(call, name: str, bad: float):
    with pytest.raises(UserError, match=r"not finite at position \[1, 2\]") as caught:
        call(**{name: holed(bad)})
    assert caught.value.field == name


@every_stream
def test_another_shape_is_refused_with_both_shapes(call, name: str):
    with pytest.raises(UserError, match=r"\(2, 4\).*\(2, 3\)") as caught:
        call(**{name: torch.zeros(2, 4)})
    assert caught.value.field == name


@every_stream
def test_integers_are_refused(call, name: str):
    with pytest.raises(UserError, match="it must be a floating-point tensor") as caught:
        call(**{name: torch.zeros(2, 3, dtype=torch.int64)})
    assert caught.value.field == name


@pytest.mark.parametrize("call", [loss, advantage, value, correction])
def test_a_mask_with_other_values_or_another_rank_is_refused(call):
    with pytest.raises(UserError, match=r"mask = 0.5: a mask holds 0 and 1 only"):
        call(mask=0.5 * ONES)
    with pytest.raises(UserError, match=r"mask = nan"):
        call(mask=math.nan * ONES)
    with pytest.raises(UserError, match=r"mask = \(6,\): it must be \[batch, time\]"):
        call(mask=ONES.flatten())


@pytest.mark.parametrize(
    ("name", "wrap"), [("rewards", None), ("baselines", None), ("components", "accuracy")]
)
def test_numbers_per_row_are_checked_too(name: str, wrap: str | None):
    def given(x: Tensor) -> dict[str, Any]:
        return {name: x if wrap is None else {wrap: x}}

    with pytest.raises(UserError, match=name):
        advantage(**given(torch.tensor([1.0, math.nan])))
    with pytest.raises(UserError, match=rf"{name}.*\(3,\).*\(2,\)"):
        advantage(**given(torch.zeros(3)))


def test_one_label_per_row_is_required():
    with pytest.raises(UserError, match=r"groups = 3: mask \(2, 3\) has 2 rows"):
        advantage(groups=["a", "b", "c"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss(clip_ratoi=0.1), "policy loss `vanilla` has no such hyperparameter"),
        (lambda: advantage(gama=0.9), "advantage estimator `grpo` has no such hyperparameter"),
        (lambda: correction(rollout_iss="token"), "did you mean `rollout_is`"),
        (lambda: padded.policy_loss("vanila", X, X, X, ONES), "did you mean `vanilla`"),
        (lambda: padded.advantage("grpoo", ROW, ONES, [0, 0]), "did you mean `grpo`"),
        (lambda: loss(aggregation="tokenmean"), "did you mean `token-mean`"),
        (lambda: padded.kl("k9", X, X), "no such KL penalty"),
    ],
)
def test_unknown_names_and_knobs_are_refused(call: Callable[[], Any], message: str):
    with pytest.raises(UserError, match=message):
        call()


def test_kl_checks_its_two_tensors():
    with pytest.raises(UserError, match=r"ref_logp = \(2, 4\).*\(2, 3\)"):
        padded.kl("k1", X, torch.zeros(2, 4))
    with pytest.raises(UserError, match=r"^logp = 'torch\.int64'"):
        padded.kl("k1", X.long(), X)
    with pytest.raises(UserError, match=r"ref_logp = 'torch\.int64'"):
        padded.kl("k1", X, X.long())


def test_group_labels_of_two_dimensions_are_refused_with_both_shapes() -> None:
    with pytest.raises(UserError, match=r"groups = \(2, 2\).*\(2,\)"):
        advantage(groups=torch.zeros(2, 2))


@pytest.mark.parametrize("name", ["vanilla", "vespo", "geo_mean"])
def test_a_negative_importance_weight_is_refused(name: str) -> None:
    weights = torch.tensor([[1.0, -0.5, 1.0], [1.0, 1.0, 1.0]])
    with pytest.raises(UserError, match=r"rollout_is_weights = -0\.5"):
        padded.policy_loss(name, X, X, X, ONES, rollout_is_weights=weights)
    masked = ONES.clone()
    masked[0, 1] = 0
    padded.policy_loss(name, X, X, X, masked, rollout_is_weights=weights)


def test_rows_without_any_position_are_refused() -> None:
    with pytest.raises(UserError, match=r"mask = \(2, 0\)"):
        advantage(mask=torch.zeros(2, 0))
