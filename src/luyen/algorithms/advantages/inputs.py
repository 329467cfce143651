"""What an advantage estimator sees and returns, and the checks of its inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.checks import (
    call_plugin,
    is_built_in,
    kind_of,
    refuse_plugin,
    require_finite,
    require_float,
    require_same_shape,
    require_token_stream,
)
from luyen.algorithms.layout import Layout
from luyen.base.boundary import own_copy
from luyen.base.errors import UserError
from luyen.base.registry import Registry


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CreditInputs:
    """One optimizer step's evidence for assigning credit; streams are `[tok]` over `layout`.

    Example:
        One sequence of two trainable tokens, rewarded at its end.

        >>> layout = Layout(mask=torch.tensor([True, True]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> CreditInputs(rewards=torch.tensor([0.0, 1.0]), layout=layout).sequence_rewards()
        tensor([1.])
    """

    rewards: Float[Tensor, " tok"]
    """Reward per token. A finite reward on a masked token still belongs to its sequence: rejection
    must not delete an outcome. NaN on a masked token means that no reward was given there."""
    layout: Layout
    """Sequences, the mask of trainable tokens, and groups."""
    values: Float[Tensor, " tok"] | None = None
    """Critic's value before each token."""
    baselines: Float[Tensor, " seq"] | None = None
    """Reward of the greedy rollout of each sequence's prompt (ReMax)."""
    components: Mapping[str, Float[Tensor, " seq"]] | None = None
    """Named parts of the reward, one number per sequence (GDPO)."""
    old_logp: Float[Tensor, " tok"] | None = None
    """Log-probability of each token under the policy that the update starts from."""
    ref_logp: Float[Tensor, " tok"] | None = None
    """The same under the reference policy (online preferences)."""
    sum_pi_squared: Float[Tensor, " tok"] | None = None
    """Σ over the vocabulary of π² at each token (optimal token baselines)."""
    is_weights: Float[Tensor, " tok"] | None = None
    """Importance weight between trainer and rollout engine, if a correction is on."""
    positions: Int[Tensor, " tok"] | None = None
    """Position of each token in its response; counted from the first trainable token if absent."""
    turns: Int[Tensor, " tok"] | None = None
    """Assistant turn of each token, from 0 up; absent: one turn. On masked tokens, anything."""

    def sequence_rewards(self) -> Float[Tensor, " seq"]:
        """Sum of the rewards of each sequence, those on masked tokens included."""
        return self.layout.sum(self.given_rewards())

    def given_rewards(self) -> Float[Tensor, " tok"]:
        """Rewards with 0 where none was given (NaN on a masked token)."""
        absent = ~self.layout.mask & torch.isnan(self.rewards)
        return torch.where(absent, 0.0, self.rewards)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Per-token advantages and returns, both exactly 0 on masked tokens.

    Example:
        >>> Credit(advantages=torch.tensor([0.5]), returns=torch.tensor([1.0])).returns
        tensor([1.])
    """

    advantages: Float[Tensor, " tok"]
    """What the policy loss multiplies."""
    returns: Float[Tensor, " tok"]
    """What the critic regresses to; equal to the advantages where no critic is involved."""
    metrics: Mapping[str, Average] = field(default_factory=dict[str, Average])
    """Metrics of the estimator beyond the group statistics."""


Estimator = Callable[..., Credit]
"""`(inputs: CreditInputs, *, hparams) -> Credit`; hparams are named like their config key."""

adv_estimators: Registry[Estimator] = Registry("advantage estimator", "algorithm.adv_estimator")


# Checks of an estimator's inputs: present, of one shape, finite; otherwise a UserError.

SOURCES = {
    "values": "enable the critic (critic.enable: true), or choose an estimator without values",
    "baselines": "score one greedy rollout of each prompt and pass its reward per sequence",
    "components": "return the parts of the reward by name and pass one number per sequence",
    "sum_pi_squared": "set actor_rollout_ref.actor.calculate_sum_pi_squared: true",
    "old_logp": "pass the log-probabilities of the policy that the update starts from",
    "ref_logp": "pass the log-probabilities of the reference policy, or choose a loss without one",
}
"""Where each optional stream comes from: the fix shown when it is missing."""


def given_rewards(inputs: CreditInputs) -> Float[Tensor, " tok"]:
    """Rewards per token, 0 where none was given; refused unless all of them are finite.

    NaN on a masked token means no reward. An infinity is refused wherever it stands, since a
    reward on a masked token counts.
    """
    require_float("rewards", inputs.rewards)
    require_same_shape("rewards", inputs.rewards, "mask", inputs.layout.mask)
    rewards = inputs.given_rewards().detach()
    require_finite("rewards", rewards)
    return rewards


def outcomes(inputs: CreditInputs) -> Float[Tensor, " seq"]:
    """Reward of each sequence, those on masked tokens included; finite."""
    return inputs.layout.sum(given_rewards(inputs))


def token_stream(inputs: CreditInputs, name: str, x: Tensor | None) -> Float[Tensor, " tok"]:
    """A stream over tokens that must be there and finite on the mask; 0 off it."""
    stream = present(name, x)
    require_same_shape(name, stream, "mask", inputs.layout.mask)
    require_finite(name, stream, inputs.layout.mask)
    return inputs.layout.on_mask(stream.detach())


def greedy_rewards(inputs: CreditInputs) -> Float[Tensor, " seq"]:
    """ReMax's baselines: there, and finite for every sequence that trains."""
    baselines = present("baselines", inputs.baselines)
    require_same_shape("baselines", baselines, "groups", inputs.layout.groups)
    require_finite("baselines", baselines, inputs.layout.lengths() > 0)
    return baselines.detach()


def present(name: str, x: Tensor | None) -> Tensor:
    """The stream itself, or a refusal that says where it comes from."""
    if x is None:
        why = "algorithm.adv_estimator reads it and it was not given"
        raise UserError(name, None, why, SOURCES[name])
    require_float(name, x)
    return x


def require_discount(name: str, value: float) -> None:
    """Raise unless 0 <= value <= 1; NaN is refused too."""
    if not 0.0 <= value <= 1.0:
        why = "a discount lies between 0 and 1"
        raise UserError(name, value, why, f"set algorithm.{name} within [0, 1]")


def call_estimator(name: str, inputs: CreditInputs, hparams: Mapping[str, Any]) -> Credit:
    """The credit by a registered estimator; one of a plugin sees copies of the inputs."""
    estimator = adv_estimators.get(name)
    if is_built_in(estimator):
        return estimator(inputs, **hparams)
    given = own_copy(inputs)
    found = call_plugin(adv_estimators, name, lambda: estimator(given, **hparams))
    if not isinstance(cast(object, found), Credit):
        refuse_plugin(adv_estimators, name, f"it gave {kind_of(found)}, not a Credit")
    for stream in ("advantages", "returns"):
        require_token_stream(adv_estimators, name, stream, getattr(found, stream), inputs.rewards)
    return Credit(
        advantages=found.advantages.detach(), returns=found.returns.detach(), metrics=found.metrics
    )
