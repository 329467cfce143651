"""Engines that replicas make: importable by name, so that they reach another process; and the
weights that are published to them."""

from collections.abc import Callable, Generator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from luyen.config.check import check
from luyen.models.load import load_policy
from luyen.models.weights import tensor_digests
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.split_engine import EngineRanks
from luyen.runtime.training import RankPlace
from luyen.runtime.weight_sync import PendingSync, WeightSync
from luyen.runtime.weights import GatheredWeights, Gathering, pack, total_bytes
from luyen.train.builders.roles import build_engine
from luyen.train.builders.setup import import_plugins, load_run_tokenizer
from tests.generation import native
from tests.tiny_models import tiny_policy


def tiny_engine(index: int, *, seed: int = 0) -> RolloutEngine:
    """The embedded engine over a tiny model."""
    torch.set_num_threads(1)
    return native(tiny_policy("llama", seed=seed))


def split_tiny_engine(
    index: int,
    rank: int,
    ranks: int,
    address: str,
    faulty: Callable[[BaseException], object],
) -> RolloutEngine | None:
    """One rank's part of the same engine."""
    torch.set_num_threads(1)
    place = RankPlace(device="cpu", rank=rank, ranks=ranks, address=address, timeout_s=60)
    engine_ranks = EngineRanks(place, faulty=faulty)
    policy = tiny_policy("llama")
    engine_ranks.divide(policy)
    engine = engine_ranks.add(native(policy), policy)
    if rank == 0:
        return engine
    engine_ranks.follow()
    return None


def engine_of_run(index: int, *, words: tuple[str, ...]) -> RolloutEngine:
    """The engine of a run, made from nothing but its configuration."""
    torch.set_num_threads(1)
    config = check([], words).config
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    policy = load_policy(
        config.actor_rollout_ref.model,
        device="cpu",
        vocabulary=tokenizer.size,
        seed=config.trainer.seed,
    )
    return build_engine(config, policy, tokenizer)


def in_buckets(tensors: Mapping[str, Tensor], *, most_bytes: int) -> Generator[dict[str, Tensor]]:
    """The tensors in order, in buckets of at most `most_bytes`; a larger tensor is one bucket."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bucket and total_bytes((*bucket.values(), tensor)) > most_bytes:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


class Given:
    """Workers whose weights are these; `meant` are those whose digests are announced."""

    def __init__(self, weights: Mapping[str, Tensor], meant: Mapping[str, Tensor]) -> None:
        self.weights, self.meant = weights, meant

    def gather(self, form: str | None = None) -> Gathering:
        ray = import_module("ray")
        found = GatheredWeights(
            parts=[ray.put(pack(one)) for one in in_buckets(self.weights, most_bytes=50_000)],
            bytes=total_bytes(self.weights.values()),
            seconds=0.0,
            digests={f"actor/{name}": text for name, text in tensor_digests(self.meant).items()},
        )
        return lambda: found

    def raise_if_lost(self) -> None:
        """They are here."""


def begin_publication(
    engines: RayEngines,
    weights: Mapping[str, Tensor],
    *,
    version: int,
    meant: Mapping[str, Tensor] | None = None,
) -> PendingSync:
    """Start to publish weights of this process to replicas, in several parts."""
    workers: Any = Given(weights, weights if meant is None else meant)
    return WeightSync(workers, engines.replica_pool).begin(version)
