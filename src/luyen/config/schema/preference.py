"""`preference`: learning which of two answers is better, or whether one is good."""

from typing import Literal

from luyen.config.schema.block import Block, Names, Numbers, key


class Preference(Block):
    """A loss over pairs or over marked answers, or a mixture of such."""

    loss_type: Names = key(
        ("sigmoid",),
        "Registered preference loss, or several that are added up: sigmoid (DPO), ipo, hinge, "
        "robust, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, "
        "discopop, sigmoid_norm, sft, orpo, cpo, simpo, alphapo; of marked answers kto, "
        "apo_zero_unpaired, bco.",
    )
    loss_weights: Numbers = key((), "Weight of each loss of a mixture; empty: 1.")
    beta: float | None = key(
        None, "How strongly the reference binds, or the scale of the reward; null: 0.1.", gt=0
    )
    label_smoothing: float | None = key(
        None, "Chance that the two answers of a pair were swapped; null: 0.", ge=0, le=0.5
    )
    f_divergence_type: (
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] | None
    ) = key(None, "Divergence from the reference behind the loss; null: reverse_kl.")
    f_alpha_divergence_coef: float | None = key(None, "alpha of alpha_divergence; null: 0.5.", gt=0)
    discopop_tau: float | None = key(None, "discopop: temperature; null: 0.05.", gt=0)
    cpo_alpha: float | None = key(
        None, "cpo, simpo: weight of the likelihood of chosen answers; null: the loss's own.", ge=0
    )
    simpo_gamma: float | None = key(None, "simpo, alphapo: target margin; null: 0.5.")
    alpha: float | None = key(None, "alphapo: shape of the reward; null: 0.25.")
    desirable_weight: float | None = key(
        None, "kto, apo_zero_unpaired, bco: weight of good answers; null: 1.", ge=0
    )
    undesirable_weight: float | None = key(
        None, "kto, apo_zero_unpaired, bco: weight of bad answers; null: 1.", ge=0
    )
    ld_alpha: float | None = key(
        None,
        "Weight of the tokens that only the longer answer of a pair has (LD-DPO); null: 1.",
        ge=0,
        le=1,
    )
    use_margins: bool = key(False, "Use the column `margin`, where a loss reads margins.")
    reference: Literal["live", "precomputed"] = key(
        "live",
        "Where the reference's log-probabilities come from. live: from a frozen copy at every "
        "step, or from the policy with its adapter off; precomputed: once for all rows before the "
        "first step, so that no copy stays in memory.",
    )
