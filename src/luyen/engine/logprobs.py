"""Log-probabilities of given tokens, without gradients, over a batch or a shard of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.heartbeat import beat
from luyen.engine.batch import (
    REPLAYED_ROUTES,
    ROUTES,
    BatchShard,
    MicroBatching,
    PackedBatch,
    join_shards,
    pack,
    split_batch,
)
from luyen.engine.fsdp import dummy_loss, reshard
from luyen.models.experts import RoutingLog
from luyen.models.policy import Policy


def score(
    policy: Policy,
    batch: PackedBatch,
    passes: MicroBatching,
    *,
    temperature: float,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    likeliest: bool = False,
) -> dict[str, Tensor]:
    """Streams over a whole batch, by the names of `TokenScores`: `logp`, and those asked for."""
    (shard,) = shards = split_batch(batch, passes, ranks=1)
    found = score_shard(
        policy,
        shard,
        temperature=temperature,
        entropy=entropy,
        sum_pi_squared=sum_pi_squared,
        likeliest=likeliest,
    )
    return join_shards(shards, [found], batch)


@torch.no_grad()
def score_shard(
    policy: Policy,
    shard: BatchShard,
    *,
    temperature: float,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    likeliest: bool = False,
    device: torch.device | None = None,
    begin_pass: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """The streams of `score` over the tokens of a shard, on its device.

    Experts of a mixture are those of the batch where it says which are to be used.
    `device` is where passes run, if not where the weights are; `begin_pass` is called before each.
    """
    home, here = shard.batch.tokens.device, device or policy.device
    batch = shard.to(here).batch
    wanted = {"logp": True, "entropy": entropy, "sum_pi_squared": sum_pi_squared}
    wanted["is_likeliest"] = likeliest
    found = {
        n: torch.zeros(batch.tokens.shape, device=here) for n, is_on in wanted.items() if is_on
    }
    for indices in shard.passes:
        if not indices:
            dummy_loss(policy, here)
            continue
        begin_pass()
        part, place = batch.take(indices), batch.positions(indices)
        scored = policy(
            part.tokens,
            part.lengths,
            part.layout.mask,
            temperature=temperature,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
            likeliest=likeliest,
            routing=routing_log(part) if REPLAYED_ROUTES in part.streams else None,
        )
        for name, stream in found.items():
            stream[place] = part.scatter(getattr(scored, name))
        beat()
    reshard(policy)
    return {name: stream.to(home) for name, stream in found.items()}


@torch.no_grad()
def count_experts(policy: Policy, shard: BatchShard, *, device: torch.device) -> Tensor:
    """`[layer, expert]` choices of each expert of a mixture for the tokens of a shard."""
    batch = shard.to(device).batch
    counts: list[Tensor] = []
    for indices in shard.passes:
        # A dummy pass takes part in the collectives of other ranks, and counts for nothing.
        part = batch.take(indices) if indices else dummy_batch(device)
        routing = routing_log(part)
        policy(part.tokens, part.lengths, part.layout.mask, routing=routing)
        counts.append(routing.counts() * bool(indices))
        beat()
    reshard(policy)
    return torch.stack(counts).sum(0)


def routing_log(part: PackedBatch) -> RoutingLog:
    """A log for a pass over a batch, which knows of the experts that the sampler chose."""
    replayed = part.streams.get(REPLAYED_ROUTES)
    if replayed is not None:
        return RoutingLog(replayed, is_replayed=True)
    return RoutingLog(part.streams.get(ROUTES))


def dummy_batch(device: torch.device) -> PackedBatch:
    """The least that a pass can read."""
    return pack([[0, 0]], masks=[[0, 1]], groups=[0], device=device)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenPolicy:
    """A policy that only scores: the reference, or a teacher.

    Example:
        >>> sorted(FrozenPolicy.__slots__)
        ['device', 'policy', 'temperature']
    """

    policy: Policy
    """Its weights, which do not learn."""
    temperature: float
    """Temperature that its log-probabilities are taken at, as those of the actor are."""
    device: torch.device | None = None
    """Where passes run, if not where the weights are."""

    def score_shard(self, shard: BatchShard) -> dict[str, Tensor]:
        """Log-probabilities of the tokens of a shard."""
        return score_shard(self.policy, shard, temperature=self.temperature, device=self.device)
