"""Values and gradients of every loss against a second implementation in plain Python floats."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import PolicyInputs, policy_losses
from tests.unit.algorithms.batches import layout_of
from tests.unit.algorithms.scalar_losses import SCALAR, Row

LENGTHS = (3, 1, 6, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    loss: str
    hparams: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    constant: bool = False

    def __str__(self) -> str:
        flags = "-weighted" * self.weighted + "-constant" * self.constant
        return self.loss + flags + "".join(f"-{k}={v}" for k, v in self.hparams.items())


def both(loss: str, **hparams: Any) -> list[Case]:
    """The case with and without correction weights."""
    return [Case(loss=loss, hparams=hparams, weighted=w) for w in (False, True)]


CASES = [
    *both("vanilla"),
    *both("vanilla", clip_ratio_low=0.1, clip_ratio_high=0.4, clip_ratio_c=1.3),
    *both("vanilla", ratio_cap=1.5, clip_ratio_c=9.0),
    *both("gspo"),
    *both("gspo", clip_ratio=0.05, ratio_cap=1.1),
    *both("gspo_token", clip_ratio_low=0.02, clip_ratio_high=0.04),
    *both("geo_mean"),
    *both("geo_mean", clip_ratio_low=0.1, clip_ratio_high=0.5),
    Case(loss="geo_mean", constant=True),
    *both("gpg"),
    *both("reinforce"),
    *both("cispo"),
    *both("cispo", clip_ratio_low=0.05, clip_ratio_high=0.5),
    *both("cispo", cispo_cap=1.1),
    *both("sapo"),
    *both("sapo", tau_pos=0.5, tau_neg=3.0),
    *both("dro", dro_beta=0.3),
    *both("vespo"),
    *both("vespo", vespo_k_pos=0.5, vespo_lambda_pos=1.5, vespo_k_neg=1.0, vespo_lambda_neg=0.1),
    *both("dppo_tv"),
    *both("dppo_tv", clip_ratio_low=0.03, clip_ratio_high=0.06, clip_ratio_c=1.1),
    *both("dppo_kl"),
    *both("dppo_kl", clip_ratio_low=0.01, clip_ratio_high=0.02, clip_ratio_c=1.1),
    *both("clip_cov", clip_cov_ratio=0.3, clip_cov_lb=-0.5, clip_cov_ub=2.0),
    *both("kl_cov", kl_cov_ratio=0.3),
    *both("kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=2.0),
    Case(loss="bypass_mode", hparams={"loss_type": "ppo_clip"}),
    Case(
        loss="bypass_mode",
        hparams={"loss_type": "ppo_clip", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.05},
    ),
    Case(loss="bypass_mode", hparams={"loss_type": "reinforce"}),
    Case(loss="bypass_mode", hparams={"loss_type": "reinforce", "rollout_is": "token"}),
    Case(
        loss="bypass_mode",
        hparams={
            "loss_type": "reinforce",
            "rollout_is": "sequence",
            "rollout_is_threshold": 1.2,
            "rollout_is_floor": 0.9,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": 0.06,
        },
    ),
    Case(
        loss="bypass_mode",
        hparams={
            "loss_type": "reinforce",
            "rollout_is": "geometric",
            "rollout_is_threshold": "0.8_1.1",
            "rollout_is_batch_normalize": True,
        },
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def make_inputs(case: Case) -> PolicyInputs:
    """One step with the statistics that the loss asks for."""
    generator = torch.Generator().manual_seed(20)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    logp = -normal(1.0).abs() - 0.1
    old = (logp + normal(0.35)).clamp(max=-0.02)
    advantages = normal(1.0)
    if case.constant:
        advantages = (
            torch.tensor([1.5, -0.5, 0.0, 2.0]).double().repeat_interleave(torch.tensor(LENGTHS))
        )
    inputs = PolicyInputs(
        logp=logp.requires_grad_(),
        old_logp=old,
        advantages=advantages,
        rollout_logp=logp.detach() + normal(0.3),
        is_weights=normal(0.3).exp() if case.weighted else None,
        layout=layout_of(*LENGTHS),
    )
    statistics = Objective(loss=case.loss, hparams=case.hparams).statistics(inputs, seed=5)
    return PolicyInputs(
        logp=inputs.logp,
        old_logp=inputs.old_logp,
        advantages=inputs.advantages,
        rollout_logp=inputs.rollout_logp,
        is_weights=inputs.is_weights,
        layout=inputs.layout,
        statistics=statistics,
    )


def rows_of(inputs: PolicyInputs) -> tuple[list[Row], list[list[float]]]:
    """The same step as plain lists."""

    def cut(stream: torch.Tensor | None) -> list[Any]:
        if stream is None:
            return [None] * len(LENGTHS)
        return [part.tolist() for part in stream.detach().split(LENGTHS)]

    selected = cut(inputs.statistics.get("selected"))
    norm = float(inputs.statistics.get("is_norm", torch.ones(())))
    streams = (inputs.old_logp, inputs.advantages, inputs.rollout_logp, inputs.is_weights)
    rows = [
        Row(old=old, adv=adv, roll=roll, weight=weight, selected=chosen, norm=norm)
        for old, adv, roll, weight, chosen in zip(*map(cut, streams), selected, strict=True)
    ]
    return rows, cut(inputs.logp)


def loss_only(case: Case) -> dict[str, Any]:
    """The knobs without those of the statistics pass, which has run before."""
    return {k: v for k, v in case.hparams.items() if "_cov_" not in k}


@every_case
def test_value_of_each_token_is_the_formula(case: Case):
    inputs = make_inputs(case)
    rows, logp = rows_of(inputs)
    hparams = loss_only(case)
    got = policy_losses.get(case.loss)(inputs, **hparams).per_token
    scalar = SCALAR[case.loss]
    expected = [
        x for row, xs in zip(rows, logp, strict=True) for x in scalar(xs, xs, row, **hparams)
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)
    assert any(abs(x) > 1e-3 for x in expected)


@every_case
def test_gradient_is_the_central_difference_with_stopped_parts_held_constant(case: Case):
    inputs = make_inputs(case)
    rows, logp = rows_of(inputs)
    hparams = loss_only(case)
    weights = torch.linspace(0.5, 1.5, sum(LENGTHS), dtype=torch.float64)
    loss = (weights * policy_losses.get(case.loss)(inputs, **hparams).per_token).sum()
    (grad,) = torch.autograd.grad(loss, [inputs.logp])
    scalar, h = SCALAR[case.loss], 1e-5
    expected: list[float] = []
    for row, xs, ws in zip(rows, logp, weights.split(LENGTHS), strict=True):
        for i in range(len(xs)):
            ends: list[float] = []
            for step in (h, -h):
                moved = [x + step * (j == i) for j, x in enumerate(xs)]
                losses = scalar(moved, xs, row, **hparams)
                ends.append(sum(w * x for w, x in zip(ws.tolist(), losses, strict=True)))
            expected.append((ends[0] - ends[1]) / (2 * h))
    assert grad.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_every_registered_loss_has_a_scalar_twin_and_a_case():
    assert set(SCALAR) == set(policy_losses) == {case.loss for case in CASES}
