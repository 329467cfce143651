"""How long new weights take to a replica on the GPU of a rank, in place and through the host.

Both are Ray actors, as in a run: the rank has the policy with fp32 masters, the replica the engine
of the rollouts. Weights are random, and each publication sends other ones. It is complete when the
replica has confirmed the digest of every parameter; the rank digests its masters too.

    python benchmarks/publish_weights.py --model qwen3-8b
"""

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch

from luyen.config.schema.actor_rollout_ref import OptimConfig, RolloutConfig
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import MicroBatching
from luyen.engine.optim import build_optimizer
from luyen.models.random_policy import SHAPES, shaped_policy
from luyen.rollout.engines import native
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.gpu_memory import cuda_memory, describe
from luyen.runtime.ray.actors import start_engines
from luyen.runtime.ray.cluster import connect
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.replica import Replica
from luyen.runtime.ray.roles import share_memory
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.worker import TrainWorker

PLACE = {"num_cpus": 1, "num_gpus": 0.4}
SHARE = 0.2
"""Of the GPU, for weights and cache of the replica."""
STORE = 24 << 30
"""Bytes of the object store: one copy of 8B weights, with room; a smaller one writes to disk."""


class Changing:
    """A rank whose weights change without an update."""

    def __init__(self, worker: TrainWorker) -> None:
        self.worker = worker
        self.weights = worker.weights
        self.weight_sums = worker.weight_sums
        self.weights_in_place = worker.weights_in_place

    def change(self, factor: float) -> None:
        """Multiply every weight in place."""
        with torch.no_grad():
            for parameter in self.worker.actor.policy.parameters():
                parameter.mul_(factor)
        torch.cuda.synchronize()

    def parts(self) -> dict[str, float]:
        """Seconds of what the rank does for a publication in place."""
        start = time.perf_counter()
        self.weight_sums()
        digested = time.perf_counter()
        weights = self.weights_in_place()
        assert weights is not None, "the weights are whole and on the GPU"
        describe(weights, cuda_memory())
        return {"digests": digested - start, "handles": time.perf_counter() - digested}


def make_rank(model: str, rank: int, *_: object) -> Any:
    """The rank: bf16 weights, fp32 masters."""
    policy = shaped_policy(model, dtype=torch.bfloat16, device="cuda")
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-6))
    actor = ActorEngine(policy, optimizer, MicroBatching(max_tokens=4096), temperature=1.0)
    return Changing(TrainWorker(actor=actor, reference=None, critic=None, rank=rank))


def make_replica(model: str, index: int) -> RolloutEngine:
    """The replica."""
    policy = shaped_policy(model, dtype=torch.bfloat16, device="cuda", seed=1 + index)
    rollout = RolloutConfig(gpu_memory_utilization=SHARE, max_num_seqs=8)
    return native(policy, rollout, longest=512, decode=lambda _: "")


class Noted:
    """Takes the facts of each publication, as a monitor does."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def published(self, **facts: Any) -> None:
        """Keep them."""
        self.facts.append(facts)


def main() -> None:
    """Publish by either way, and print how long it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--host-rounds", type=int, default=2)
    args = parser.parse_args()
    connection = connect(store_bytes=STORE)
    ranks: RankGroup[Any] = RankGroup(partial(make_rank, args.model), places=[PLACE])
    engines = start_engines(partial(make_replica, args.model), replicas=1, places=[PLACE])
    pool, noted = engines.replica_pool, Noted()
    watch: Any = noted
    sync = WeightSync(ranks, pool, watch)
    share_memory(ranks, pool)
    ways = {"in place": (ranks.form, args.rounds), "host": (lambda: "bytes", args.host_rounds)}
    version = 0
    for name, (form, rounds) in ways.items():
        ranks.form, noted.facts = form, []
        for _ in range(rounds + 1):
            version += 1
            sync.release()
            sync.change()
            ranks.all(Changing.change, 1.01)
            sync.begin(version).wait()
        first, *rest = [one["seconds"] for one in noted.facts]
        size, way = noted.facts[-1]["size"], noted.facts[-1]["way"]
        print(
            f"{name} (by {way}): {size / 1e9:.2f} GB in {median(rest):.3f} s, "
            f"first {first:.3f} s, all {[round(one, 3) for one in rest]}",
            flush=True,
        )
    (parts,) = ranks.all(Changing.parts)
    start = time.perf_counter()
    pool.call_all(Replica.fingerprint)
    parts["replica's digests, with the message"] = time.perf_counter() - start
    print({name: round(seconds, 4) for name, seconds in parts.items()})
    engines.close()
    pool.stop()
    ranks.stop()
    connection.disconnect()


if __name__ == "__main__":
    main()
