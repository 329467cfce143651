"""Bypass mode: the sampler is the old policy."""

import math
from dataclasses import replace
from typing import Any

import pytest

from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import PolicyInputs, loss_statistics, policy_losses
from luyen.base.errors import UserError
from tests.unit.algorithms.batches import f64, layout_of, metrics_of

LOG2 = math.log(2.0)


def step() -> PolicyInputs:
    """Ratios to the sampler: 2 and 1 in one sequence, 1/2 alone in another; old_logp is absurd."""
    return PolicyInputs(
        logp=f64(-1.0, -1.0, -1.0),
        old_logp=f64(-9.0, -9.0, -9.0),
        advantages=f64(1.0, 1.0, -1.0),
        rollout_logp=f64(-1.0 - LOG2, -1.0, -1.0 + LOG2),
        is_weights=f64(7.0, 7.0, 7.0),
        layout=layout_of(2, 1),
    )


def bypass(inputs: PolicyInputs, **hparams: Any) -> list[float]:
    return policy_losses.get("bypass_mode")(inputs, **hparams).per_token.tolist()


def test_ppo_clip_is_vanilla_against_the_sampler_and_ignores_weights():
    expected = pytest.approx([-1.2, -1.0, 0.8])
    assert bypass(step()) == expected
    assert bypass(step(), rollout_is="token") == expected


def test_ppo_clip_reads_the_clip_knobs():
    assert bypass(step(), clip_ratio_high=0.5, clip_ratio_low=0.7) == pytest.approx(
        [-1.5, -1.0, 0.5]
    )


def test_reinforce_multiplies_by_the_weight_and_by_no_other():
    assert bypass(step(), loss_type="reinforce") == pytest.approx([1.0, 1.0, -1.0])
    assert bypass(step(), loss_type="reinforce", rollout_is="token") == pytest.approx(
        [2.0, 1.0, -0.5]
    )
    assert bypass(
        step(), loss_type="reinforce", rollout_is="sequence", rollout_is_threshold=1.5
    ) == pytest.approx([1.5, 1.5, -0.5])


def test_batch_normalisation_divides_by_the_mean_weight_of_the_whole_step():
    hparams = {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
    }
    objective = Objective(loss="bypass_mode", hparams=hparams)
    statistics = objective.statistics(step(), seed=0)
    assert statistics["is_norm"].item() == pytest.approx(3.5 / 3)
    got = bypass(replace(step(), statistics=statistics), **hparams)
    assert got == pytest.approx([6 / 3.5, 3 / 3.5, -1.5 / 3.5])


def test_there_are_no_statistics_without_batch_normalisation():
    choose = loss_statistics.get("bypass_mode")
    assert choose(step(), seed=0, rollout_is="token") == {}
    assert choose(step(), seed=0, rollout_is_batch_normalize=True) == {}


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_rejected_tokens_have_no_loss_and_are_counted(loss_type: str):
    hparams = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1, "rollout_is": "token"}
    loss = policy_losses.get("bypass_mode")(step(), loss_type=loss_type, **hparams)
    assert loss.per_token[[0, 2]].tolist() == [0.0, 0.0]
    assert loss.per_token[1].item() == pytest.approx(-1.0 if loss_type == "ppo_clip" else 1.0)
    metrics = metrics_of(loss)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0)


def test_the_sampler_s_stream_is_required():
    with pytest.raises(UserError, match="rollout_logp = None: bypass_mode takes the sampling"):
        bypass(replace(step(), rollout_logp=None))


def test_normalisation_without_the_statistics_pass_is_refused():
    with pytest.raises(UserError, match="run the statistics pass first"):
        bypass(step(), rollout_is="token", rollout_is_batch_normalize=True)


def test_an_unknown_loss_type_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean `reinforce`"):
        bypass(step(), loss_type="reinforc")
