"""The policy's training engine: scores sequences, and takes optimizer steps on an objective."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import PolicyInputs
from luyen.algorithms.statistic import Average
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import MasterAdamW
from luyen.engine.passes import Passes
from luyen.engine.step import Updated, take_step
from luyen.models.policy import Policy


@torch.no_grad()
def score(
    policy: Policy,
    batch: PackedBatch,
    passes: Passes,
    *,
    temperature: float,
    prefix: str = "",
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> dict[str, Tensor]:
    """Streams `logp`, and on demand `entropy` and `sum_pi_squared`, over a whole batch."""
    found: dict[str, Tensor] = {}
    for indices in passes.of(batch.lengths, batch.labels()):
        part = batch.take(indices)
        scored = policy(
            part.tokens,
            part.lengths,
            part.layout.mask,
            temperature=temperature,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
        )
        streams = {
            "logp": scored.logp,
            "entropy": scored.entropy,
            "sum_pi_squared": scored.sum_pi_squared,
        }
        for name, values in streams.items():
            if values is not None:
                stream = found.setdefault(prefix + name, _empty(batch))
                stream[batch.positions(indices)] = part.scatter(values)
    return found


def _empty(batch: PackedBatch) -> Tensor:
    return torch.zeros(batch.tokens.shape, device=batch.tokens.device)


def gap_metrics(gaps: Sequence[Tensor]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from those the sampler drew with."""
    if not gaps:
        return {}
    gap = torch.cat(list(gaps))
    return {
        "parity/max_gap": float(gap.max()),
        "parity/mean_gap": float(gap.mean()),
        "parity/exact_fraction": float((gap == 0).float().mean()),
    }


@final
class ActorEngine:
    """One policy on one device, its optimizer, and how passes are cut."""

    def __init__(
        self, policy: Policy, optimizer: MasterAdamW, passes: Passes, *, temperature: float
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.passes = passes
        self.temperature = temperature

    def update(self, batch: PackedBatch, objective: Objective, *, lr: float, seed: int) -> Updated:
        """One optimizer step on the whole batch, whatever the micro-batches are."""
        weights = objective.weights(batch.rollouts)
        statistics = self._statistics(batch, objective, seed)
        gaps: list[Tensor] = []

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            inputs, entropy = self._inputs(part, objective)
            if inputs.rollout_logp is not None and "old_logp" not in part.streams:
                gap = inputs.logp.detach() - inputs.rollout_logp
                gaps.append(gap[part.layout.mask].abs())
            sliced = {k: v[place] if v.dim() else v for k, v in statistics.items()}
            return objective(
                replace(inputs, statistics=sliced),
                weights[place],
                entropy=entropy,
                ref_logp=part.streams.get("ref_logp"),
            )

        done = take_step(self.policy, self.optimizer, batch, self.passes, part_loss, lr=lr)
        return replace(done, metrics={**done.metrics, **gap_metrics(gaps)})

    def _inputs(self, part: PackedBatch, objective: Objective) -> tuple[PolicyInputs, Tensor]:
        scored = self.policy(
            part.tokens,
            part.lengths,
            part.layout.mask,
            temperature=self.temperature,
            entropy=True,
            entropy_gradient=objective.entropy_coeff != 0.0,
        )
        assert scored.entropy is not None
        return self._policy_inputs(part, part.scatter(scored.logp)), part.scatter(scored.entropy)

    def _policy_inputs(self, part: PackedBatch, logp: Tensor) -> PolicyInputs:
        streams = part.streams
        return PolicyInputs(
            logp=logp,
            old_logp=streams["old_logp"] if "old_logp" in streams else logp.detach(),
            advantages=streams["advantages"],
            layout=part.layout,
            rollout_logp=streams.get("rollout_logp"),
            is_weights=streams.get("is_weights"),
        )

    def _statistics(
        self, batch: PackedBatch, objective: Objective, seed: int
    ) -> Mapping[str, Tensor]:
        """What a loss that chooses over the step needs, from a pass without gradients."""
        if not objective.needs_statistics:
            return {}
        found = score(self.policy, batch, self.passes, temperature=self.temperature)
        return objective.statistics(self._policy_inputs(batch, found["logp"]), seed=seed)
