"""Group-relative credit turn by turn: what a turn led to, against siblings that reached that turn.

A sample reaches a turn when something trains in that turn or in a later one. Every sample reaches
the first turn, also one in which nothing trains: its outcome is evidence about the prompt.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.advantages.evidence import given_rewards, require_discount
from luyen.algorithms.advantages.grouping import Grouping, centred, group_std
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators
from luyen.algorithms.advantages.timeline import credited_to
from luyen.algorithms.checks import require_same_shape
from luyen.algorithms.knobs import require_positive
from luyen.algorithms.summed import summed
from luyen.base.errors import UserError


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
    table = summed(rewards, layout.segment * count + turns, layout.num_sequences * count)
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
