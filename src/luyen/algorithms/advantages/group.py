"""Group-relative estimators: GRPO and its relatives, GDPO by reward component, GRPO by turn.

All of them give one number to every trainable token of a sequence, 0 to a sequence that is alone
in its group, and exactly 0 when the whole group has the same reward. A sequence without trainable
tokens still counts as a sibling: its outcome is evidence about the prompt.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.advantages.grouping import Grouping, centred, group_std, runner_up, whiten
from luyen.algorithms.advantages.inputs import (
    SOURCES,
    Credit,
    CreditInputs,
    adv_estimators,
    given_rewards,
    outcomes,
    require_discount,
)
from luyen.algorithms.advantages.returns import credited_to
from luyen.algorithms.checks import (
    require_finite,
    require_float,
    require_positive,
    require_same_shape,
)
from luyen.algorithms.layout import Layout, sum_by_index
from luyen.base.errors import UserError, did_you_mean


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
    """The best sample of a group gets its lead over the second best, the rest get 0 (2503.19595).

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


# GDPO: every part of the reward is normalised within the group before the parts are added.


@adv_estimators.register("gdpo")
def gdpo(
    inputs: CreditInputs,
    *,
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    std_epsilon: float = 1e-6,
) -> Credit:
    """Σ_k w_k (r_k - mean) / (std + ε), then whitened over the batch's tokens (arXiv:2601.05242).

    Keys default to all components in their order, weights to ones. The advantage comes from the
    components alone; the token rewards are only checked.
    """
    require_positive("std_epsilon", std_epsilon)
    given_rewards(inputs)
    parts = chosen_components(inputs, gdpo_reward_keys)
    weights = component_weights(gdpo_reward_weights, tuple(parts))
    grouping = Grouping.of(inputs.layout.groups)
    total = torch.zeros_like(next(iter(parts.values())))
    for part, weight in zip(parts.values(), weights, strict=True):
        total = total + weight * centred(part, grouping) / (group_std(part, grouping) + std_epsilon)
    return whitened_over_batch(total, inputs.layout, grouping)


def chosen_components(
    inputs: CreditInputs, keys: Sequence[str] | None
) -> Mapping[str, Float[Tensor, " seq"]]:
    """The components that `keys` name, in that order, each finite for every sequence."""
    given = inputs.components
    if not given:
        why = "algorithm.adv_estimator `gdpo` adds the parts of the reward and none was given"
        raise UserError("components", given, why, SOURCES["components"])
    names = list(given) if keys is None else list(keys)
    if not names or len(set(names)) < len(names):
        why = "it must name at least one component, and none twice"
        raise UserError("gdpo_reward_keys", names, why, "known: " + ", ".join(given))
    for name in names:
        if name not in given:
            why = f"the reward has no component {name!r}"
            raise UserError("gdpo_reward_keys", names, why, did_you_mean(name, given))
        field = f"components[{name!r}]"
        require_float(field, given[name])
        require_same_shape(field, given[name], "groups", inputs.layout.groups)
        require_finite(field, given[name])
    return {name: given[name].detach() for name in names}


def component_weights(weights: Sequence[float] | None, names: tuple[str, ...]) -> Sequence[float]:
    """One finite weight per component; ones by default."""
    if weights is None:
        return [1.0] * len(names)
    if len(weights) != len(names) or not all(math.isfinite(w) for w in weights):
        why = f"{len(names)} components ({', '.join(names)}) need as many finite weights"
        raise UserError("gdpo_reward_weights", list(weights), why, "pass one weight per component")
    return weights


# Group-relative credit turn by turn: what a turn led to, against siblings that reached that
# turn.
#
# A sample reaches a turn when something trains in that turn or in a later one. Every sample
# reaches the first turn, also one in which nothing trains: its outcome is evidence about the
# prompt.


@adv_estimators.register("turn_grpo")
def turn_grpo(
    inputs: CreditInputs,
    *,
    gamma: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    std_epsilon: float = 1e-6,
) -> Credit:
    """(R_k - mean) / (std + ε) on turn k, over the samples of the group that reached turn k.

    R_k discounts the rewards of turn k and later ones by turns. Where fewer than two samples of the
    group reached turn k, the advantage is that of the whole rollout: R_0 against the whole group.
    With one turn this is `grpo`, to the last bit.
    """
    require_discount("gamma", gamma)
    require_positive("std_epsilon", std_epsilon)
    epsilon = std_epsilon if norm_adv_by_std_in_grpo else None
    layout, turns = inputs.layout, turns_of(inputs)
    returns = returns_by_turn(inputs, turns, gamma=gamma)
    last = torch.zeros_like(layout.groups).scatter_reduce(0, layout.segment, turns, "amax")
    whole = relative(returns[:, 0], layout.groups, epsilon)[0]
    table = whole[:, None].repeat(1, returns.shape[1])
    for turn in range(1, returns.shape[1]):
        reached = (last >= turn).nonzero().squeeze(-1)
        found, compared = relative(returns[reached, turn], layout.groups[reached], epsilon)
        table[reached, turn] = torch.where(compared, found, whole[reached])
    advantages = layout.on_mask(table[layout.segment, turns])
    return Credit(advantages=advantages, returns=advantages)


def turns_of(inputs: CreditInputs) -> Int[Tensor, " tok"]:
    """The turn whose action each token's reward belongs to.

    That is the turn of the trainable token it is credited to (`credited_to`); 0 where nothing
    trains. A trainable token without a turn is refused.
    """
    layout = inputs.layout
    if inputs.turns is None:
        return torch.zeros_like(layout.segment)
    require_same_shape("turns", inputs.turns, "mask", layout.mask)
    acted = inputs.turns[layout.mask].long()
    if bool((acted < 0).any()):
        why = "a token that trains belongs to an assistant turn, and turns count from 0"
        raise UserError("turns", int(acted.min()), why, "give every sampled token its turn")
    target = credited_to(layout)
    turns = torch.zeros_like(layout.segment)
    turns[target >= 0] = acted[target[target >= 0]]
    return turns


def returns_by_turn(
    inputs: CreditInputs, turns: Int[Tensor, " tok"], *, gamma: float
) -> Float[Tensor, "seq turn"]:
    """R_k of every sequence: rewards of turn k plus gamma times R of the next turn."""
    layout, rewards = inputs.layout, given_rewards(inputs)
    count = int(turns.max()) + 1 if turns.numel() else 1
    table = sum_by_index(rewards, layout.segment * count + turns, layout.num_sequences * count)
    table = table.view(layout.num_sequences, count)
    for turn in range(count - 2, -1, -1):
        table[:, turn] += gamma * table[:, turn + 1]
    return table


def relative(
    returns: Float[Tensor, " some"], groups: Int[Tensor, " some"], std_epsilon: float | None
) -> tuple[Float[Tensor, " some"], Bool[Tensor, " some"]]:
    """Returns against their group, and whether there was anything to compare with.

    None as `std_epsilon`: no division by the standard deviation.
    """
    grouping = Grouping.of(groups)
    found = centred(returns, grouping)
    if std_epsilon is not None:
        found = found / (group_std(returns, grouping) + std_epsilon)
    return found, grouping.has_siblings()
