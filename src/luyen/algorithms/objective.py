"""One callable for the training engine: policy loss, entropy bonus and KL loss, composed.

The engine runs `statistics` over the whole optimizer step once, then calls the objective on each
micro-batch with its slice of the step's weights, and adds up what it returns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.aggregation import Average, aggregation_weights
from luyen.algorithms.checks import (
    hyperparameter_names,
    read_by,
    require_known,
    require_not_negative,
)
from luyen.algorithms.kl import PENALTIES, kl_penalty
from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses import PolicyInputs, loss_statistics, policy_losses
from luyen.algorithms.policy_losses.inputs import call_policy_loss
from luyen.base.errors import UserError, did_you_mean
from luyen.config.catalog import POLICY_LOSSES


def loss_hyperparameters(name: str) -> tuple[str, ...]:
    """Every hyperparameter of a policy loss, those of its statistics pass included."""
    passes = [loss_statistics.get(name)] if name in loss_statistics else []
    return hyperparameter_names(policy_losses.get(name), *passes)


def default_aggregation(name: str) -> str:
    """The aggregation of a loss if none is set; a plugin declares its own as a fact."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name].aggregation
    return policy_losses.facts(name).get("aggregation", "token-mean")


def step_statistics(
    name: str, inputs: PolicyInputs, *, seed: int, hparams: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What the loss must know about the whole step; empty for a loss without a statistics pass."""
    if name not in loss_statistics:
        return {}
    choose = loss_statistics.get(name)
    with torch.no_grad():
        return dict(choose(inputs, seed=seed, **read_by(choose, hparams)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an update minimises: Σ weight·(policy loss - entropy_coeff·H + kl_loss_coef·KL).

    Names and hyperparameters are checked when the record is made.

    Example:
        >>> Objective(loss="gspo", hparams={"clip_ratio": 3e-4}).mode
        'seq-mean-token-mean'
    """

    loss: str
    """Name of a registered policy loss."""
    hparams: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Hyperparameters of the loss and of its statistics pass, under their config keys."""
    aggregation: str | None = None
    """How tokens are weighted; None: the loss's own way."""
    loss_scale_factor: float | None = None
    """The constant of seq-mean-token-sum-norm."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; negative values penalise entropy."""
    kl_loss_coef: float = 0.0
    """Weight of the KL loss; 0: there is none."""
    kl_loss_type: str = "low_var_kl"
    """Which KL penalty (`kl.PENALTIES`)."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balance loss of a mixture of experts, which the engine adds."""

    def __post_init__(self) -> None:
        require_known(f"policy loss `{self.loss}`", self.hparams, loss_hyperparameters(self.loss))
        require_not_negative("kl_loss_coef", self.kl_loss_coef)
        require_not_negative("router_aux_loss_coef", self.router_aux_loss_coef)
        if self.kl_loss_type not in PENALTIES:
            fix = did_you_mean(self.kl_loss_type, PENALTIES)
            raise UserError("kl_loss_type", self.kl_loss_type, "no such KL penalty", fix)

    @property
    def mode(self) -> str:
        """The aggregation in force."""
        return self.aggregation or default_aggregation(self.loss)

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss looks at the whole step before the step is split."""
        return self.loss in loss_statistics

    def weights(self, layout: Layout, dtype: torch.dtype = torch.float32) -> Float[Tensor, " tok"]:
        """Weight of each token, from the layout of the whole optimizer step over all ranks."""
        factor = self.loss_scale_factor
        return aggregation_weights(self.mode, layout, loss_scale_factor=factor, dtype=dtype)

    def statistics(self, inputs: PolicyInputs, *, seed: int) -> dict[str, Tensor]:
        """Streams and scalars for `PolicyInputs.statistics`, from the inputs of the whole step."""
        return step_statistics(self.loss, inputs, seed=seed, hparams=self.hparams)

    def __call__(
        self,
        inputs: PolicyInputs,
        weights: Float[Tensor, " tok"],
        *,
        entropy: Float[Tensor, " tok"] | None = None,
        ref_logp: Float[Tensor, " tok"] | None = None,
        exact_kl: Float[Tensor, " tok"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Average]]:
        """(this part's share of the step's loss, metrics that merge over parts).

        Entropy is reported whenever it is given. `exact_kl` is the stream that kl_loss_type `full`
        asks for, since it needs logits. Masked positions of any stream do not matter.
        """
        loss = policy_losses.get(self.loss)
        found = call_policy_loss(self.loss, inputs, read_by(loss, self.hparams))
        layout, per_token = inputs.layout, found.per_token
        metrics = dict(found.metrics)
        metrics["actor/pg_loss"] = _weighted_mean(per_token, weights)
        if entropy is not None:
            metrics["actor/entropy"] = Average.over(entropy, layout.mask)
        if self.entropy_coeff != 0.0:
            per_token = per_token - self.entropy_coeff * _given("entropy", entropy, layout)
        if self.kl_loss_coef != 0.0:
            penalty = self._penalty(inputs, ref_logp, exact_kl)
            metrics["actor/kl_loss"] = Average.over(penalty, layout.mask)
            per_token = per_token + self.kl_loss_coef * penalty
        return (weights * per_token).sum(), metrics

    def _penalty(
        self,
        inputs: PolicyInputs,
        ref_logp: Float[Tensor, " tok"] | None,
        exact_kl: Float[Tensor, " tok"] | None,
    ) -> Float[Tensor, " tok"]:
        """KL penalty of each token, 0 on masked tokens."""
        if self.kl_loss_type in ("full", "full+"):
            return _given("exact_kl", exact_kl, inputs.layout)
        reference = _given("ref_logp", ref_logp, inputs.layout)
        return inputs.layout.on_mask(kl_penalty(self.kl_loss_type, inputs.logp, reference))


def _given(
    name: str, stream: Float[Tensor, " tok"] | None, layout: Layout
) -> Float[Tensor, " tok"]:
    """The stream, cleaned; a UserError if a term of the objective needs it and it is absent."""
    if stream is None:
        why = "a term of the objective with a coefficient other than 0 reads it"
        raise UserError(name, None, why, "pass the stream, or set the coefficient to 0")
    return layout.on_mask(stream)


def _weighted_mean(per_token: Float[Tensor, " tok"], weights: Float[Tensor, " tok"]) -> Average:
    """Mean of the loss under the weights: the aggregated loss itself wherever weights sum to 1."""
    return Average(total=(weights * per_token).detach().sum(), count=weights.sum())
