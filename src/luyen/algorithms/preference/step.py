"""One callable for the training engine: a preference loss or a mixture, and its derivatives.

Every loss of this package is a function of a few numbers of the whole optimizer step: one sum of
log-probabilities per sequence. Its derivative by each sum is all that a backward pass needs, so a
step can be cut anywhere, even between the two answers of a pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.checks import hyperparameter_names, read_by, require_known
from luyen.algorithms.layout import Layout
from luyen.algorithms.preference.inputs import (
    PairInputs,
    PreferenceLoss,
    UnpairedInputs,
    over_all,
    preference_losses,
)
from luyen.base.errors import UserError
from luyen.config.catalog import PREFERENCE_LOSSES, PreferenceFacts

# From tokens to sequences: sums of log-probabilities, plain or with a lighter tail.
#
# LD-DPO (arXiv:2409.06411) weighs the tokens beyond the length of the shorter answer of a pair
# by `ld_alpha`, since what an answer says there the other had no room to say.


def token_weights(
    layout: Layout, shared: Int[Tensor, " seq"], *, ld_alpha: float
) -> Float[Tensor, " tok"]:
    """1 on the first `shared` trainable tokens of a sequence, ld_alpha on the rest, 0 elsewhere.

    Example:
        >>> layout = Layout(mask=torch.tensor([False, True, True, True]),
        ...                 offsets=torch.tensor([0, 4]), groups=torch.tensor([0]))
        >>> token_weights(layout, torch.tensor([2]), ld_alpha=0.5).tolist()
        [0.0, 1.0, 1.0, 0.5]
    """
    if not 0.0 <= ld_alpha <= 1.0:
        why = "it weighs the tokens that only the longer answer has"
        raise UserError("ld_alpha", ld_alpha, why, "set ld_alpha in [0, 1]")
    counted = torch.cumsum(layout.mask.long(), 0)
    before = torch.nn.functional.pad(counted, (1, 0))[layout.offsets[:-1]]
    place = counted - before[layout.segment]
    weights = torch.where(place <= shared[layout.segment], 1.0, ld_alpha)
    return layout.on_mask(weights)


def sequence_sums(
    logp: Float[Tensor, " tok"],
    layout: Layout,
    weights: Float[Tensor, " tok"] | None = None,
) -> Float[Tensor, " seq"]:
    """Sum of log-probabilities over the trainable tokens of each sequence, weighted or plain.

    The weights of `token_weights` go to the policy and to the reference alike.
    """
    clean = layout.on_mask(logp)
    return layout.sum(clean if weights is None else clean * weights.to(clean.dtype))


Inputs = PairInputs | UnpairedInputs

_OF_ANSWERS = ("mismatched", "density_ratio", "history")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients:
    """The loss of a whole step and its derivative by the sum of each sequence.

    Example:
        >>> by = {"logp": torch.tensor([-0.5])}
        >>> StepCoefficients(loss=torch.tensor(1.0), by=by, metrics={}, rewards={}).by["logp"]
        tensor([-0.5000])
    """

    loss: Float[Tensor, ""]
    """Mean over the pairs or answers of the step."""
    by: Mapping[str, Float[Tensor, " n"]]
    """Derivative of that mean by each sum: `chosen` and `rejected`, or `logp`."""
    rewards: Mapping[str, Float[Tensor, " n"]]
    """Implicit rewards, as in `PreferenceLoss`."""
    metrics: Mapping[str, Average]
    """Averages over the whole step."""


def preference_facts(name: str) -> PreferenceFacts:
    """What a loss needs from the run; a plugin declares it when it registers."""
    preference_losses.get(name)
    if name in PREFERENCE_LOSSES:
        return PREFERENCE_LOSSES[name]
    return PreferenceFacts(**preference_losses.facts(name))


def step_mean(loss: Float[Tensor, " n"], *, of: int | None = None) -> Float[Tensor, ""]:
    """Mean over the pairs or answers of one step; for a part, its share of the mean over `of`.

    Shares of the parts of a step add up to the loss of the step. A step without pairs has loss 0.

    Example:
        >>> step_mean(torch.tensor([1.0, 2.0]), of=6)
        tensor(0.5000)
    """
    return loss.sum() / max(loss.numel() if of is None else of, 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective:
    """What a preference stage minimises: Σ weight·loss over one or several losses.

    Names and hyperparameters are checked when the record is made. Each loss of a mixture reads
    those that it has.

    Example:
        >>> objective = PreferenceObjective(losses=("sigmoid", "sft"), loss_weights=(0.8, 1.0))
        >>> objective.kind, objective.needs_reference, objective.needs_step
        ('pair', True, False)
    """

    losses: tuple[str, ...]
    """Names of the losses."""
    loss_weights: tuple[float, ...] | None = None
    """Weight of each; None: 1."""
    hparams: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Hyper-parameters by the name of their config key."""
    ld_alpha: float | None = None
    """Weight of the tokens beyond the shorter answer of a pair (LD-DPO); None: 1."""

    def __post_init__(self) -> None:
        _check_mixture(self.losses, self.loss_weights)
        known = {hparam for name in self.losses for hparam in _hyperparameters_of(name)}
        owner = "preference loss " + " + ".join(f"`{name}`" for name in self.losses)
        require_known(owner, self.hparams, known)
        if self.hparams.get("f_divergence_type", "reverse_kl") != "reverse_kl":
            for name in self.losses:
                _require_divergence(name, self.hparams["f_divergence_type"])
        if self.ld_alpha is not None:
            _require_log_ratios(self.losses, self.ld_alpha)

    @property
    def kind(self) -> str:
        """`pair` or `unpaired`."""
        return preference_facts(self.losses[0]).kind

    @property
    def needs_reference(self) -> bool:
        """Whether a loss reads the reference's log-probabilities."""
        return any(preference_facts(name).reference for name in self.losses)

    def reads(self, name: str) -> bool:
        """Whether a loss reads numbers beyond the sums: `margins`, `mismatched`, `history`."""
        facts = (preference_facts(loss) for loss in self.losses)
        return any(name in (*fact.needs, *fact.optional) for fact in facts)

    @property
    def needs_step(self) -> bool:
        """Whether a loss looks at the sums of the whole step, so that parts alone do not do."""
        return any(preference_facts(name).needs_step for name in self.losses)

    def __call__(self, inputs: Inputs) -> PreferenceLoss:
        """Losses of these pairs or answers: all of the step, or a part where `needs_step` is no."""
        if self.needs_step and not inputs.is_whole:
            why = f"{', '.join(self.losses)} looks at the sums of the whole step"
            fix = "take its coefficients from the whole step, then train on parts"
            raise UserError("preference.loss_type", self.losses[0], why, fix)
        _refuse_unread(self.losses, inputs)
        weights = self.loss_weights or (1.0,) * len(self.losses)
        parts = [_evaluate(name, inputs, self.hparams) for name in self.losses]
        if len(parts) == 1 and self.loss_weights is None:
            return parts[0]
        loss = torch.stack([w * p.loss for w, p in zip(weights, parts, strict=True)]).sum(0)
        metrics = {k: v for part in reversed(parts) for k, v in part.metrics.items()}
        metrics["preference/loss"] = over_all(loss)
        for name, part in zip(self.losses, parts, strict=True):
            metrics[f"preference/{name}_loss"] = part.metrics["preference/loss"]
        return PreferenceLoss(loss=loss, rewards=parts[0].rewards, metrics=metrics)

    def token_weights(
        self, layout: Layout, shared: Int[Tensor, " seq"]
    ) -> Float[Tensor, " tok"] | None:
        """Weights for `sequence_sums`, of the policy and of the reference; None: all 1.

        `shared` is the length of the shorter answer of the pair that each sequence belongs to.
        """
        if self.ld_alpha is None:
            return None
        return token_weights(layout, shared, ld_alpha=self.ld_alpha)

    def coefficients(self, inputs: Inputs) -> StepCoefficients:
        """Loss and derivatives of one whole step, from sums that need no gradient.

        Computed in float64. A training pass then minimises Σ coefficient·sum over sequences, in
        parts of any cut; where the sums are weighted by token, it uses the same weights.
        """
        sums = inputs.policy()
        leaves = {name: x.detach().double().requires_grad_() for name, x in sums.items()}
        with torch.enable_grad():
            result = self(replace(inputs, **leaves))
            loss = step_mean(result.loss)
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        by = {n: g.to(x.dtype) for (n, x), g in zip(sums.items(), found, strict=True)}
        return StepCoefficients(
            loss=loss.detach(), by=by, rewards=result.rewards, metrics=result.metrics
        )


def step_coefficients(
    name: str | Sequence[str],
    inputs: Inputs,
    hparams: Mapping[str, Any],
    *,
    loss_weights: Sequence[float] | None = None,
) -> StepCoefficients:
    """`PreferenceObjective.coefficients` of a loss, or of a mixture given by several names."""
    objective = PreferenceObjective(
        losses=(name,) if isinstance(name, str) else tuple(name),
        loss_weights=None if loss_weights is None else tuple(loss_weights),
        hparams=hparams,
    )
    return objective.coefficients(inputs)


def _hyperparameters_of(name: str) -> tuple[str, ...]:
    return hyperparameter_names(preference_losses.get(name))


def _check_mixture(losses: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
    """Refuse an empty mixture, one of unlike losses, and weights that do not fit."""
    if not losses:
        fix = "name a loss, such as sigmoid"
        raise UserError("preference.loss_type", losses, "there is nothing to minimise", fix)
    kinds = {preference_facts(name).kind for name in losses}
    if len(kinds) > 1:
        why = "some of these losses read pairs and some read marked answers"
        raise UserError("preference.loss_type", losses, why, "mix losses of one kind")
    if weights is not None and len(weights) != len(losses):
        why = f"there are {len(losses)} losses"
        raise UserError("preference.loss_weights", weights, why, "give one weight for each")


def _require_divergence(name: str, kind: str) -> None:
    """Raise where a loss reads log-ratios one by one: another divergence has no meaning there."""
    if preference_facts(name).reference and "f_divergence_type" not in _hyperparameters_of(name):
        why = f"`{name}` is not a function of the difference of a pair"
        raise UserError("f_divergence_type", kind, why, "set f_divergence_type to reverse_kl")


def _require_log_ratios(losses: tuple[str, ...], ld_alpha: float) -> None:
    """Raise where a lighter tail would change a likelihood, or where there is no pair."""
    for name in losses:
        facts = preference_facts(name)
        if facts.kind != "pair" or not facts.reference:
            why = f"`{name}` is not a function of the log-ratios of a pair"
            raise UserError("ld_alpha", ld_alpha, why, "leave ld_alpha out")


def _refuse_unread(losses: tuple[str, ...], inputs: Inputs) -> None:
    """Raise on inputs of the other kind, and on numbers that no loss of the mixture would read."""
    facts = [preference_facts(name) for name in losses]
    if (facts[0].kind == "pair") != isinstance(inputs, PairInputs):
        why = f"it reads {'pairs' if facts[0].kind == 'pair' else 'marked answers'}"
        raise UserError("preference.loss_type", losses[0], why, "choose a loss for these data")
    read = {name for fact in facts for name in (*fact.optional, *fact.needs)}
    names = ("margins",) if isinstance(inputs, PairInputs) else _OF_ANSWERS
    for name in names:
        if getattr(inputs, name) is not None and name not in read:
            why = f"{', '.join(losses)} does not read it"
            raise UserError(name, "given", why, "leave it out, or choose a loss that reads it")


def _evaluate(name: str, inputs: Inputs, hparams: Mapping[str, Any]) -> PreferenceLoss:
    """One loss of a mixture, with the hyperparameters that it reads."""
    loss = preference_losses.get(name)
    return loss(inputs, **read_by(loss, hparams))
