"""The composed objective."""

import math
from typing import Any

import pytest
import torch

from luyen.algorithms import objective
from luyen.algorithms.objective import Objective, default_aggregation, loss_hyperparameters
from luyen.algorithms.policy_losses import PolicyInputs, TokenLoss, policy_losses
from luyen.algorithms.policy_losses import inputs as policy_inputs
from luyen.algorithms.policy_losses.inputs import PolicyLoss
from luyen.base.errors import UserError
from luyen.base.registry import Registry
from luyen.config.catalog import POLICY_LOSSES
from tests.unit.algorithms.batches import f64, layout_of

LAYOUT = layout_of(2, 1, mask=[True, False, True])


def step() -> PolicyInputs:
    return PolicyInputs(
        logp=f64(-1.0, math.nan, -2.0),
        old_logp=f64(-1.0, 0.0, -2.0),
        advantages=f64(1.0, 0.0, -3.0),
        layout=LAYOUT,
    )


def run(made: Objective, **streams: torch.Tensor) -> tuple[float, dict[str, float]]:
    loss, metrics = made(step(), made.weights(LAYOUT, torch.float64), **streams)
    return loss.item(), {name: average.value() for name, average in metrics.items()}


def test_policy_loss_entropy_bonus_and_kl_loss_add_up():
    made = Objective(loss="reinforce", entropy_coeff=0.1, kl_loss_coef=0.5, kl_loss_type="k2")
    streams = {"entropy": f64(2.0, math.nan, 4.0), "ref_logp": f64(-2.0, math.nan, -2.0)}
    loss, metrics = run(made, **streams)
    # -A·logp: 1 and -6; entropy: 2 and 4; k2: 0.5 and 0; mean over the two tokens
    assert loss == pytest.approx((1.0 - 0.2 + 0.25 - 6.0 - 0.4) / 2)
    assert metrics == {
        "actor/ppo_kl": 0.0,
        "actor/pg_loss": pytest.approx(-2.5),
        "actor/entropy": pytest.approx(3.0),
        "actor/kl_loss": pytest.approx(0.25),
    }


def test_entropy_is_reported_without_a_coefficient_and_the_reference_is_not_read():
    loss, metrics = run(Objective(loss="reinforce"), entropy=f64(2.0, math.nan, 4.0))
    assert loss == pytest.approx(-2.5)
    assert metrics["actor/entropy"] == 3.0
    assert "actor/kl_loss" not in metrics


@pytest.mark.parametrize("kind", ["full", "full+"])
def test_the_exact_kl_comes_as_a_stream(kind: str):
    made = Objective(loss="gpg", kl_loss_coef=2.0, kl_loss_type=kind)
    loss, metrics = run(made, exact_kl=f64(0.3, math.nan, 0.1))
    assert loss == pytest.approx(-2.5 + 2.0 * 0.2)
    assert metrics["actor/kl_loss"] == pytest.approx(0.2)


def test_knobs_reach_the_loss_and_its_statistics_pass():
    made = Objective(loss="kl_cov", hparams={"kl_cov_ratio": 1.0, "ppo_kl_coef": 3.0})
    assert made.statistics(step(), seed=0)["selected"].tolist() == [True, False, True]
    assert loss_hyperparameters("kl_cov") == ("kl_cov_ratio", "ppo_kl_coef")
    assert Objective(loss="vanilla").statistics(step(), seed=0) == {}


def test_the_statistics_pass_runs_without_a_graph():
    inputs = PolicyInputs(
        logp=f64(-1.0).requires_grad_(),
        old_logp=f64(-1.0),
        advantages=f64(1.0),
        rollout_logp=f64(-1.5),
        layout=layout_of(1),
    )
    hparams = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    made = Objective(loss="bypass_mode", hparams=hparams)
    assert not made.statistics(inputs, seed=0)["is_norm"].requires_grad


def test_every_loss_has_its_own_aggregation_and_another_one_is_honoured():
    means = {name for name in policy_losses if default_aggregation(name) != "token-mean"}
    assert means == {"gspo", "gspo_token", "sapo", "geo_mean"}
    assert {default_aggregation(name) for name in means} == {"seq-mean-token-mean"}
    assert Objective(loss="gspo").mode == "seq-mean-token-mean"
    assert Objective(loss="gspo", aggregation="token-sum").mode == "token-sum"
    weights = Objective(loss="gspo", aggregation="token-sum").weights(LAYOUT)
    assert weights.tolist() == [1.0, 0.0, 1.0]


def test_knobs_of_every_loss_are_those_of_the_catalogue():
    for name, facts in POLICY_LOSSES.items():
        assert loss_hyperparameters(name) == tuple(sorted(facts.hparams)), name


def test_a_plugin_declares_its_aggregation_as_a_fact(monkeypatch: pytest.MonkeyPatch):
    def plugin(inputs: PolicyInputs, *, strength: float = 1.0) -> TokenLoss:
        return TokenLoss(per_token=strength * inputs.logp, metrics={})

    fresh: Registry[PolicyLoss] = Registry("policy loss", "loss_mode")
    fresh.register("summed", aggregation="token-sum")(plugin)
    fresh.register("plain")(plugin)
    for module in (objective, policy_inputs):
        monkeypatch.setattr(module, "policy_losses", fresh)
    assert Objective(loss="summed").mode == "token-sum"
    assert Objective(loss="plain").mode == "token-mean"
    assert run(Objective(loss="summed", hparams={"strength": 2.0}))[0] == pytest.approx(-6.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"loss": "gspo", "hparams": {"tau_pos": 1.0}},
            "policy loss `gspo` has no such hyperparameter",
        ),
        ({"loss": "gspo", "hparams": {"clip_ration": 1.0}}, "did you mean `clip_ratio`"),
        ({"loss": "gpg", "hparams": {"clip_ratio": 0.1}}, r"\(it has: none\). Fix: remove it"),
        ({"loss": "vanila"}, "did you mean `vanilla`"),
        ({"loss": "gpg", "kl_loss_type": "k4"}, "kl_loss_type = 'k4': no such KL penalty"),
        ({"loss": "gpg", "kl_loss_coef": -1.0}, "kl_loss_coef = -1.0: it must be 0 or more"),
    ],
)
def test_what_does_not_exist_is_refused_when_the_objective_is_made(
    fields: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message):
        Objective(**fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"entropy_coeff": 0.1}, "entropy"),
        ({"kl_loss_coef": 0.1}, "ref_logp"),
        ({"kl_loss_coef": 0.1, "kl_loss_type": "full"}, "exact_kl"),
    ],
)
def test_a_stream_that_a_term_reads_is_required(fields: dict[str, Any], name: str):
    with pytest.raises(UserError, match=f"{name} = None: a term of the objective"):
        run(Objective(loss="gpg", **fields))
