"""What an estimator may ask of its inputs: present, of one shape, finite; or refused by name."""

from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.advantages.inputs import CreditInputs
from luyen.algorithms.checks import require_finite, require_float, require_same_shape
from luyen.base.errors import UserError

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
