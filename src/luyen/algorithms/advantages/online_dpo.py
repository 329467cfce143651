"""Online preferences: the best and the worst sample of a prompt are a pair.

A preference loss is a function of one sum of log-probabilities per sequence. With minus its
derivative by that sum as the advantage of every token, the loss -A·log π, summed over tokens, has
the gradient of the preference loss at the policy that the sums are of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.advantages.grouping import Grouping
from luyen.algorithms.advantages.inputs import (
    Credit,
    CreditInputs,
    adv_estimators,
    outcomes,
    token_stream,
)
from luyen.algorithms.aggregation import Average
from luyen.algorithms.preference.inputs import PairInputs
from luyen.algorithms.preference.step import PreferenceObjective, sequence_sums


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPairs:
    """Which sequences of a step are compared.

    Example:
        >>> rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.5]), torch.tensor([0, 0, 0, 1])
        >>> pairs = sampled_pairs(rewards, groups, live=rewards > -1)
        >>> pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.groups
        ([1], [0], 2)
    """

    chosen: Int[Tensor, " pair"]
    """Place of the best sequence of each group that makes a pair."""
    rejected: Int[Tensor, " pair"]
    """Place of its worst."""
    groups: int
    """Groups of the step, those without a pair included."""


@adv_estimators.register("online_dpo")
def online_dpo(
    inputs: CreditInputs,
    *,
    loss_type: Sequence[str] = ("sigmoid",),
    loss_weights: Sequence[float] | None = None,
    beta: float | None = None,
    label_smoothing: float | None = None,
    f_divergence_type: str | None = None,
    f_alpha_divergence_coef: float | None = None,
    discopop_tau: float | None = None,
    cpo_alpha: float | None = None,
    simpo_gamma: float | None = None,
    alpha: float | None = None,
    ld_alpha: float | None = None,
) -> Credit:
    """-d loss / d (sum of log-probabilities) of the best and the worst sample of each group.

    All other samples get 0, and so does a group whose samples all have the same reward. A sample
    without trainable tokens is no side of a pair. The loss is the mean over the pairs of the step
    (DPO on sampled pairs: arXiv:2402.04792).
    """
    given = {
        "beta": beta,
        "label_smoothing": label_smoothing,
        "f_divergence_type": f_divergence_type,
        "f_alpha_divergence_coef": f_alpha_divergence_coef,
        "discopop_tau": discopop_tau,
        "cpo_alpha": cpo_alpha,
        "simpo_gamma": simpo_gamma,
        "alpha": alpha,
    }
    hparams: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    objective = PreferenceObjective(
        losses=tuple(loss_type),
        loss_weights=None if loss_weights is None else tuple(loss_weights),
        hparams=hparams,
        ld_alpha=ld_alpha,
    )
    return credit_of_pairs(inputs, objective)


def credit_of_pairs(inputs: CreditInputs, objective: PreferenceObjective) -> Credit:
    """Minus the derivative of an objective by the sum of each sequence, on each of its tokens."""
    layout = inputs.layout
    pairs = sampled_pairs(outcomes(inputs), layout.groups, layout.lengths() > 0)
    weights = objective.token_weights(layout, _shared(layout.lengths(), pairs))
    sums = _sums(inputs, "old_logp", inputs.old_logp, weights)
    count = torch.tensor(len(pairs.chosen), dtype=torch.float64)
    groups = torch.tensor(pairs.groups, dtype=torch.float64)
    metrics = {"preference/tied_fraction": Average(total=groups - count, count=groups)}
    per_sequence = torch.zeros_like(sums)
    if len(pairs.chosen):
        ref = None
        if objective.needs_reference:
            ref = _sums(inputs, "ref_logp", inputs.ref_logp, weights)
        found = objective.coefficients(_pair_inputs(sums, ref, layout.lengths(), pairs))
        metrics |= found.metrics
        per_sequence[pairs.chosen] = -found.by["chosen"]
        per_sequence[pairs.rejected] = -found.by["rejected"]
    advantages = layout.spread(per_sequence)
    if weights is not None:
        advantages = advantages * weights.to(advantages.dtype)
    return Credit(advantages=advantages, returns=advantages, metrics=metrics)


def sampled_pairs(
    rewards: Float[Tensor, " seq"], groups: Int[Tensor, " seq"], live: Bool[Tensor, " seq"]
) -> SampledPairs:
    """The best and the worst `live` sequence of each group in which they differ.

    Of several with the same reward it is the first; the order of samples does not depend on their
    content.
    """
    grouping = Grouping.of(groups)
    best = grouping.max(torch.where(live, rewards, -torch.inf))
    worst = -grouping.max(torch.where(live, -rewards, -torch.inf))
    differ = best > worst
    return SampledPairs(
        chosen=_first(live & (rewards == grouping.spread(best)), grouping)[differ],
        rejected=_first(live & (rewards == grouping.spread(worst)), grouping)[differ],
        groups=grouping.sizes.numel(),
    )


def _first(is_one: Tensor, grouping: Grouping) -> Int[Tensor, " group"]:
    """Place of the first sequence of each group that is one."""
    places = torch.arange(is_one.numel(), device=is_one.device)
    beyond = torch.full_like(grouping.sizes, is_one.numel())
    return beyond.scatter_reduce(0, grouping.index[is_one], places[is_one], "amin")


def _shared(lengths: Int[Tensor, " seq"], pairs: SampledPairs) -> Int[Tensor, " seq"]:
    """Trainable tokens of the shorter sequence of each pair; of unpaired sequences, their own."""
    shared = lengths.clone()
    shorter = torch.minimum(lengths[pairs.chosen], lengths[pairs.rejected])
    shared[pairs.chosen] = shorter
    shared[pairs.rejected] = shorter
    return shared


def _sums(
    inputs: CreditInputs, name: str, logp: Tensor | None, weights: Tensor | None
) -> Float[Tensor, " seq"]:
    return sequence_sums(token_stream(inputs, name, logp), inputs.layout, weights)


def _pair_inputs(
    sums: Tensor, ref: Tensor | None, lengths: Tensor, pairs: SampledPairs
) -> PairInputs:
    chosen, rejected = pairs.chosen, pairs.rejected
    return PairInputs(
        chosen=sums[chosen],
        rejected=sums[rejected],
        chosen_tokens=lengths[chosen],
        rejected_tokens=lengths[rejected],
        ref_chosen=None if ref is None else ref[chosen],
        ref_rejected=None if ref is None else ref[rejected],
    )
