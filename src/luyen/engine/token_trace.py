"""Loss, ratio and gradient of each token of an optimizer step, without taking the step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses.inputs import token_ratio
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import PackedBatch


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTrace:
    """Streams over the tokens of a batch, 0 on tokens that do not train.

    Example:
        >>> one = torch.ones(1)
        >>> TokenTrace(loss=one, weight=one / 2, ratio=one, gradient=one, is_clipped=one > 1).weight
        tensor([0.5000])
    """

    loss: Tensor
    """Loss of each token, entropy and KL terms included, before weighting."""
    weight: Tensor
    """Weight of the token in the loss of the optimizer step."""
    ratio: Tensor
    """Its probability under the current policy over that under the old policy."""
    gradient: Tensor
    """Derivative of the step's loss by the token's log-probability, its weight included.

    Gradients through the rest of the distribution (entropy) are not included.
    """
    is_clipped: Tensor
    """Whether the policy loss has no gradient here although the advantage is not 0.

    The token is clipped, masked or rejected. A capped ratio that keeps its gradient (cispo) does
    not count.
    """


def trace_tokens(
    actor: ActorEngine, batch: PackedBatch, objective: Objective, *, seed: int
) -> TokenTrace:
    """The trace of the optimizer step that `ActorEngine.update` would take; changes nothing."""
    weights = objective.weights(batch.rollouts)
    statistics = actor.statistics(batch, objective, seed)
    zeros = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    found = {name: zeros.clone() for name in ("loss", "ratio", "gradient", "is_clipped")}
    for indices in actor.passes.of(batch.lengths, batch.labels()):
        part, place = batch.take(indices), batch.positions(indices)
        sliced = {k: v[place] if v.dim() else v for k, v in statistics.items()}
        for name, stream in _part(actor, part, objective, weights[place], sliced).items():
            found[name][place] = stream.to(zeros.dtype)
    is_clipped = found.pop("is_clipped").bool()
    return TokenTrace(weight=batch.layout.on_mask(weights), is_clipped=is_clipped, **found)


def _part(
    actor: ActorEngine,
    part: PackedBatch,
    objective: Objective,
    weights: Tensor,
    statistics: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    with torch.no_grad():
        seen, entropy = actor.inputs(part, objective)
    logp, weight = seen.logp.requires_grad_(), weights.detach().clone().requires_grad_()
    inputs = replace(seen, logp=logp, statistics=statistics)
    more = {"entropy": entropy, "ref_logp": part.streams.get("ref_logp")}
    # The loss is a sum of weight times loss: its derivative by a weight is the token's loss.
    total, _ = objective(inputs, weight, **more)
    loss, gradient = _derivatives(total, weight, logp)
    policy = replace(objective, entropy_coeff=0.0, kl_loss_coef=0.0)
    (pull,) = _derivatives(policy(inputs, torch.ones_like(weight), **more)[0], logp)
    layout = part.layout
    return {
        "loss": layout.on_mask(loss),
        "ratio": layout.on_mask(token_ratio(logp.detach(), inputs.old_logp)),
        "gradient": layout.on_mask(gradient),
        "is_clipped": layout.mask & (inputs.advantages != 0) & (pull == 0),
    }


def _derivatives(total: Tensor, *of: Tensor) -> list[Tensor]:
    """Derivatives by each tensor; 0 by one that the total does not depend on."""
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in of]
    found = torch.autograd.grad(total, of, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(x) if slope is None else slope for x, slope in zip(of, found, strict=True)
    ]
