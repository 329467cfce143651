"""Group-relative estimators: a sample is judged against the other samples of its prompt.

All of them give one number to every trainable token of a sequence, 0 to a sequence that is alone
in its group, and exactly 0 when the whole group has the same reward. A sequence without trainable
tokens still counts as a sibling: its outcome is evidence about the prompt.
"""

from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.advantages.evidence import outcomes
from luyen.algorithms.advantages.grouping import Grouping, centred, group_std, runner_up
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators
from luyen.algorithms.advantages.whiten import whiten
from luyen.algorithms.knobs import require_positive
from luyen.algorithms.layout import Layout


def on_every_token(per_sequence: Float[Tensor, " seq"], layout: Layout) -> Credit:
    """The same credit for every trainable token of a sequence; returns equal advantages."""
    advantages = layout.spread(per_sequence)
    return Credit(advantages=advantages, returns=advantages)


def whitened_over_batch(
    per_sequence: Float[Tensor, " seq"], layout: Layout, grouping: Grouping
) -> Credit:
    """Credit whitened over the trainable tokens of all sequences that have siblings."""
    compared = layout.mask & grouping.has_siblings()[layout.segment]
    advantages = whiten(layout.spread(per_sequence), compared)
    return Credit(advantages=advantages, returns=advantages)


@adv_estimators.register("grpo")
def grpo(
    inputs: CreditInputs, *, norm_adv_by_std_in_grpo: bool = True, std_epsilon: float = 1e-6
) -> Credit:
    """(R - mean) / (std + ε) over the group, with the sample std (Shao et al. 2024, 2402.03300).

    Without the division it is the numerator of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    """
    require_positive("std_epsilon", std_epsilon)
    rewards, grouping = outcomes(inputs), Grouping.of(inputs.layout.groups)
    advantages = centred(rewards, grouping)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (group_std(rewards, grouping) + std_epsilon)
    return on_every_token(advantages, inputs.layout)


@adv_estimators.register("grpo_passk")
def grpo_passk(
    inputs: CreditInputs, *, norm_adv_by_std_in_grpo: bool = True, std_epsilon: float = 1e-6
) -> Credit:
    """The best sample of a group gets its lead over the second best, all others 0 (2503.19595).

    A shared best leads by nothing, so the whole group gets 0.
    """
    require_positive("std_epsilon", std_epsilon)
    rewards, grouping = outcomes(inputs), Grouping.of(inputs.layout.groups)
    best = (rewards == grouping.spread(grouping.max(rewards))) & grouping.has_siblings()
    lead = (rewards - runner_up(rewards, grouping)).where(best, 0.0)
    if norm_adv_by_std_in_grpo:
        lead = lead / (group_std(rewards, grouping) + std_epsilon)
    return on_every_token(lead, inputs.layout)


@adv_estimators.register("rloo")
def rloo(inputs: CreditInputs) -> Credit:
    """R minus the mean of its siblings (Ahmadian et al. 2024, arXiv:2402.14740).

    Written n / (n - 1) · (R - mean), which is the same number.
    """
    grouping = Grouping.of(inputs.layout.groups)
    rewards = outcomes(inputs)
    n = grouping.size().to(rewards.dtype)
    advantages = centred(rewards, grouping) * (n / (n - 1).clamp(min=1))
    return on_every_token(advantages, inputs.layout)


@adv_estimators.register("opo")
def opo(inputs: CreditInputs) -> Credit:
    """R minus the group's mean weighted by trainable length (Hao et al. 2025, arXiv:2505.23585).

    A sequence without trainable tokens has length 0 and therefore no say in this baseline.
    """
    rewards = outcomes(inputs)
    lengths = inputs.layout.lengths().to(rewards.dtype)
    advantages = centred(rewards, Grouping.of(inputs.layout.groups), lengths)
    return on_every_token(advantages, inputs.layout)


@adv_estimators.register("gpg")
def gpg(inputs: CreditInputs) -> Credit:
    """α (R - mean) with α = sequences / sequences whose reward is not 0 (Chu et al., 2504.02546).

    Both counts run over sequences with trainable tokens; with no such reward α divides by 1.
    """
    rewards, live = outcomes(inputs), inputs.layout.lengths() > 0
    alpha = live.sum().to(rewards.dtype) / ((rewards != 0) & live).sum().clamp(min=1)
    advantages = alpha * centred(rewards, Grouping.of(inputs.layout.groups))
    return on_every_token(advantages, inputs.layout)


@adv_estimators.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: CreditInputs) -> Credit:
    """R - mean of the group, then whitened over the batch's tokens (Hu 2025, arXiv:2501.03262)."""
    grouping = Grouping.of(inputs.layout.groups)
    return whitened_over_batch(centred(outcomes(inputs), grouping), inputs.layout, grouping)
