"""The policy's training engine: scores sequences, and takes optimizer steps on an objective."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.expert_balance import balance_loss, balance_metric, balance_weights
from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import PolicyInputs
from luyen.base.errors import UserError
from luyen.engine.batch import (
    REPLAYED_ROUTES,
    ROUTES,
    BatchShard,
    MicroBatching,
    PackedBatch,
    split_batch,
)
from luyen.engine.logprobs import count_experts, routing_log, score, score_shard
from luyen.engine.optim import MasterOptimizer
from luyen.engine.sharded_state import (
    ShardSums,
    load_role,
    restore_role,
    role_state,
    role_weights,
    shard_sums,
    weight_buckets,
)
from luyen.engine.step import (
    LOSS_WEIGHT,
    ShardUpdateResult,
    UpdateResult,
    merge_updates,
    take_shard_step,
)
from luyen.models.experts import RoutingLog
from luyen.models.lora import adapter_off
from luyen.models.policy import Policy

_ROLE = "actor"
_STATISTICS = "statistics/"
"""Prefix of streams that a loss reads as its statistics of the step."""
_READ = ("old_logp", "advantages", "rollout_logp", "is_weights", "ref_logp")
"""Streams of a batch that a loss may read."""
_ROUTED = (ROUTES, REPLAYED_ROUTES)
"""Streams that layers of a mixture read."""
_EXPERT_WEIGHTS, _TOKENS = "router/expert_weights", "router/tokens"
"""Statistics of the load-balance loss, in addition to those that a policy loss reads."""
_AUX_LOSS = "router/aux_loss"
_AUX_FIELD = "actor_rollout_ref.actor.router_aux_loss_coef"


def gap_metrics(batch: PackedBatch, logp: Tensor) -> dict[str, float]:
    """Differences between the trainer's and the sampler's log-probabilities, if it gave them."""
    if "rollout_logp" not in batch.streams:
        return {}
    gap = (logp - batch.streams["rollout_logp"])[batch.layout.mask].abs()
    return {
        "parity/max_gap": float(gap.max()),
        "parity/mean_gap": float(gap.mean()),
        "parity/exact_fraction": int((gap == 0).sum()) / gap.numel(),
    }


def policy_inputs(part: PackedBatch, logp: Tensor) -> PolicyInputs:
    """Inputs of a policy loss, with log-probabilities of the current weights."""
    streams = part.streams
    return PolicyInputs(
        logp=logp,
        old_logp=streams["old_logp"] if "old_logp" in streams else logp.detach(),
        advantages=streams["advantages"],
        layout=part.layout,
        rollout_logp=streams.get("rollout_logp"),
        is_weights=streams.get("is_weights"),
    )


def prepare_update(
    batch: PackedBatch, objective: Objective, statistics: Mapping[str, Tensor]
) -> tuple[PackedBatch, dict[str, Tensor]]:
    """Add to a batch what depends on the whole optimizer step, before it is split.

    The batch gets the weight of every token and the per-token statistics as streams, and keeps only
    its streams that a loss or a layer reads. The second result are the scalar statistics.
    """
    streams = {name: batch.streams[name] for name in (*_READ, *_ROUTED) if name in batch.streams}
    streams |= {f"{_STATISTICS}{k}": v for k, v in statistics.items() if v.dim()}
    streams[LOSS_WEIGHT] = objective.weights(batch.rollouts)
    numbers = {k: v for k, v in statistics.items() if not v.dim()}
    return replace(batch, streams=streams), numbers


def router_statistics(counts: Sequence[Tensor], tokens: int) -> dict[str, Tensor]:
    """What the load-balance loss of a step needs, from all ranks' counts and all its tokens."""
    weights = balance_weights(torch.stack(list(counts)).sum(0), tokens)
    return {_EXPERT_WEIGHTS: weights, _TOKENS: torch.tensor(float(tokens))}


def merge_policy_updates(
    batch: PackedBatch, shards: Sequence[BatchShard], done: Sequence[ShardUpdateResult]
) -> UpdateResult:
    """`merge_updates`, with `gap_metrics` if the update returns log-probabilities."""
    merged = merge_updates(shards, done)
    if merged.logp is None:
        return merged
    logp = merged.logp.to(batch.tokens.device)
    return replace(merged, metrics={**merged.metrics, **gap_metrics(batch, logp)}, logp=logp)


@final
class ActorEngine:
    """A policy, or this rank's shards of it, its optimizer, and its micro-batching."""

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterOptimizer,
        passes: MicroBatching,
        *,
        temperature: float,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where passes run, if not where the weights are (they may be offloaded)."""
        self.policy = policy
        self.optimizer = optimizer
        self.passes = passes
        self.temperature = temperature
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._device or self.policy.device

    def score_shard(
        self, shard: BatchShard, *, entropy: bool = False, sum_pi_squared: bool = False
    ) -> dict[str, Tensor]:
        """`luyen.engine.logprobs.score_shard` at the policy's temperature."""
        return score_shard(
            self.policy,
            shard,
            temperature=self.temperature,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
            device=self.device,
        )

    def base_scores(self, shard: BatchShard) -> dict[str, Tensor]:
        """`score_shard` of the model without its adapter."""
        with adapter_off(self.policy):
            return self.score_shard(shard)

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Whole trained weights in buckets, on the first rank."""
        return weight_buckets(self.policy)

    def weight_sums(self, *, is_first: bool) -> ShardSums:
        """This rank's parts of the digests of trained weights and masters."""
        return shard_sums(role_weights(_ROLE, self.policy, self.optimizer), is_first=is_first)

    def state(self) -> dict[str, Any]:
        """Parts of a checkpoint by name."""
        return role_state(_ROLE, self.policy, self.optimizer)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any number of ranks."""
        load_role(folder, _ROLE, self.policy, self.optimizer)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a copy of `state` in place, where the model is not sharded."""
        restore_role(state, _ROLE, self.policy, self.optimizer)

    def update(
        self, batch: PackedBatch, objective: Objective, *, lr: float, seed: int
    ) -> UpdateResult:
        """One optimizer step on the whole batch; the result does not depend on micro-batching."""
        statistics = self.statistics(batch, objective, seed)
        prepared, numbers = prepare_update(batch, objective, statistics)
        (shard,) = shards = split_batch(prepared, self.passes, ranks=1)
        if objective.router_aux_loss_coef:
            numbers |= router_statistics([self.expert_counts(shard)], len(batch.tokens))
        done = self.update_shard(shard, objective, lr=lr, statistics=numbers)
        return merge_policy_updates(batch, shards, [done])

    def update_shard(
        self,
        shard: BatchShard,
        objective: Objective,
        *,
        lr: float,
        statistics: Mapping[str, Tensor],
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch from `prepare_update`.

        The result is on the device of the shard.
        """
        home, shard = shard.batch.tokens.device, shard.to(self.device)
        numbers = {name: number.to(self.device) for name, number in statistics.items()}
        balance = {k: numbers.pop(k) for k in (_EXPERT_WEIGHTS, _TOKENS) if k in numbers}
        counts: list[Tensor] = []
        # Without a separate pass for old log-probabilities, this pass computes them.
        is_first_look = "old_logp" not in shard.batch.streams
        measured = torch.zeros(shard.batch.tokens.shape, device=self.device)

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            routing = routing_log(part) if self.policy.is_routed else None
            inputs, entropy = self.inputs(part, objective, routing)
            if is_first_look:
                measured[place] = inputs.logp.detach()
            loss, metrics = objective(
                replace(inputs, statistics={**numbers, **_statistics_of(part)}),
                part.streams[LOSS_WEIGHT],
                entropy=entropy,
                ref_logp=part.streams.get("ref_logp"),
            )
            if routing is None:
                return loss, metrics
            counts.append(routing.counts())
            metrics = {**metrics, **_changed_routes(routing)}
            if not balance:
                return loss, metrics
            even, metric = _balance(routing, balance, len(part.tokens))
            return loss + objective.router_aux_loss_coef * even, {**metrics, _AUX_LOSS: metric}

        done = take_shard_step(self.policy, self.optimizer, shard, part_loss, lr=lr)
        chosen = torch.stack(counts).sum(0) if counts else None
        logp = measured if is_first_look else None
        return replace(done, logp=logp, expert_counts=chosen).to(home)

    def expert_counts(self, shard: BatchShard) -> Tensor:
        """`[layer, expert]` choices of each expert for the tokens of a shard, without gradients."""
        if not self.policy.is_routed:
            why = "this model has no routed layers that are known, or ranks divide its sequences"
            fix = "set it to 0"
            raise UserError(_AUX_FIELD, type(self.policy.model).__name__, why, fix)
        home = shard.batch.tokens.device
        return count_experts(self.policy, shard, device=self.device).to(home)

    def inputs(
        self, part: PackedBatch, objective: Objective, routing: RoutingLog | None = None
    ) -> tuple[PolicyInputs, Tensor]:
        """Inputs of a policy loss from a forward pass, and the entropy of each token."""
        if routing is None and REPLAYED_ROUTES in part.streams:
            routing = routing_log(part)
        scored = self.policy(
            part.tokens,
            part.lengths,
            part.layout.mask,
            temperature=self.temperature,
            entropy=True,
            entropy_gradient=objective.entropy_coeff != 0.0,
            routing=routing,
        )
        assert scored.entropy is not None
        return policy_inputs(part, part.scatter(scored.logp)), part.scatter(scored.entropy)

    def statistics(
        self, batch: PackedBatch, objective: Objective, seed: int
    ) -> Mapping[str, Tensor]:
        """Statistics of the whole step that a loss needs, from a pass without gradients."""
        if not objective.needs_statistics:
            return {}
        found = score(self.policy, batch, self.passes, temperature=self.temperature)
        return objective.statistics(policy_inputs(batch, found["logp"]), seed=seed)


def _changed_routes(routing: RoutingLog) -> dict[str, Average]:
    """How often routers choose other experts than the sampler's did, if these are recorded."""
    found = routing.changed()
    if found is None:
        return {}
    changed, known = found
    return {"router/changed_routes": Average(total=changed.float(), count=known.float())}


def _balance(
    routing: RoutingLog, statistics: Mapping[str, Tensor], tokens: int
) -> tuple[Tensor, Average]:
    """This part's share of the load-balance loss of the step, and the metric of it."""
    loss = balance_loss(routing.probability(), statistics[_EXPERT_WEIGHTS])
    return loss, balance_metric(loss, share=tokens / statistics[_TOKENS])


def _statistics_of(part: PackedBatch) -> dict[str, Tensor]:
    found = {k: v for k, v in part.streams.items() if k.startswith(_STATISTICS)}
    return {name.removeprefix(_STATISTICS): stream for name, stream in found.items()}
