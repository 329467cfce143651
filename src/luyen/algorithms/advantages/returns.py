"""Estimators that follow rewards back through time: GAE, REINFORCE, REINFORCE++ and ReMax.

Time counts trainable tokens: a value or a return carries over a masked token unchanged. A reward
that stands on a masked token is credited to a trainable one of its sequence (`credited_rewards`).
"""

from luyen.algorithms.advantages.evidence import greedy_rewards, require_discount, token_stream
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators
from luyen.algorithms.advantages.timeline import credited_rewards, discounted_to_go, next_value
from luyen.algorithms.advantages.whiten import whiten


@adv_estimators.register("gae")
def gae(
    inputs: CreditInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten_advantages: bool = True
) -> Credit:
    """Σ_k (γλ)^k δ_{t+k} with δ = r + γ V_next - V (Schulman et al. 2015, arXiv:1506.02438).

    The last token's V_next is 0. Returns are advantages + values, taken before whitening.
    """
    require_discount("gamma", gamma)
    require_discount("lam", lam)
    layout, values = inputs.layout, token_stream(inputs, "values", inputs.values)
    delta = credited_rewards(inputs) + gamma * next_value(values, layout) - values
    advantages = discounted_to_go(delta, layout, discount=gamma * lam)
    returns = layout.on_mask(advantages + values)
    if whiten_advantages:
        advantages = whiten(advantages, layout.mask)
    return Credit(advantages=advantages, returns=returns)


@adv_estimators.register("reinforce")
def reinforce(inputs: CreditInputs, *, gamma: float = 1.0) -> Credit:
    """The discounted return from each token on: no baseline, no whitening (Williams 1992)."""
    require_discount("gamma", gamma)
    returns = discounted_to_go(credited_rewards(inputs), inputs.layout, discount=gamma)
    return Credit(advantages=returns, returns=returns)


@adv_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: CreditInputs, *, gamma: float = 1.0) -> Credit:
    """Discounted returns whitened over the batch's trainable tokens (Hu 2025, arXiv:2501.03262)."""
    returns = reinforce(inputs, gamma=gamma).returns
    return Credit(advantages=whiten(returns, inputs.layout.mask), returns=returns)


@adv_estimators.register("remax")
def remax(inputs: CreditInputs) -> Credit:
    """Return from each token on, minus the greedy rollout's reward (Li et al. 2023, 2310.10505)."""
    layout = inputs.layout
    baselines = layout.spread(greedy_rewards(inputs))
    returns = discounted_to_go(credited_rewards(inputs), layout, discount=1.0)
    return Credit(advantages=returns - baselines, returns=returns)
