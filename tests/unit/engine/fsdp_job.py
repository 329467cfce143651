"""Recorded steps by one process or by ranks, and one rank of a world that takes them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from luyen.algorithms.objective import Objective
from luyen.checkpoint.tensors import save_state
from luyen.config.schema.model import ModelConfig
from luyen.engine.actor import ActorEngine, merge_policy_updates, policy_inputs, prepare_update
from luyen.engine.batch import BatchShard, PackedBatch, join_shards, split_batch
from luyen.engine.critic import CriticEngine
from luyen.engine.fsdp import join_ranks, leave_ranks, mesh_shape, shard
from luyen.engine.logprobs import score_shard
from luyen.engine.optim import MasterOptimizer
from luyen.engine.sequence_parallel import divide_sequences
from luyen.engine.sharded_state import full_weights, load_role, role_state
from luyen.engine.step import merge_updates
from luyen.models.lora import adapter_off, add_adapter
from luyen.models.policy import Policy, ValueModel
from tests.tiny_models import DEVICE, tiny_net
from tests.unit.engine.fsdp_cases import OPTIM, SUITES, Case, recorded

BEFORE = {4: 1, 2: 4}
"""Each world also goes on from what another one saved."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which rank this process is, and how it hears what the others found."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None

    def all(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        if self.mesh is None:
            return [mine]
        dist.all_gather_object(found, mine)
        return found


class Trainee:
    """A policy, a reference and perhaps a critic, alone or sharded."""

    def __init__(self, case: Case, ranks: Ranks, mesh: DeviceMesh | None) -> None:
        self.case, self.ranks = case, ranks
        self.policy = self._policy(lora_rank=case.lora_rank)
        self.reference = None if case.lora_rank else self._policy().requires_grad_(False)
        value = ValueModel(self._policy()) if case.has_critic else None
        if value is not None:
            generator = torch.Generator().manual_seed(1)
            drawn = torch.randn(value.value.weight.shape, generator=generator)
            value.value.weight.data.copy_(0.1 * drawn)
        self.shared = min(case.sequence_ranks, ranks.world)
        if mesh is not None:
            self.shard([self.policy, self.reference, value], mesh)
        optimizer = MasterOptimizer(self.policy.parameters(), OPTIM)
        self.device = torch.device(DEVICE)
        self.actor = ActorEngine(
            self.policy, optimizer, case.passes, temperature=0.9, device=self.device
        )
        self.critic = None
        if value is not None:
            self.critic = CriticEngine(
                value,
                MasterOptimizer(value.parameters(), OPTIM),
                case.passes,
                cliprange_value=0.5,
                aggregation="token-mean",
                loss_scale_factor=None,
                device=self.device,
            )

    def shard(self, models: list[Policy | ValueModel | None], mesh: DeviceMesh) -> None:
        """Weights over all ranks, and sequences over those that share them."""
        split = divide_sequences(self.ranks.world, self.shared, timeout_s=120.0)
        for model in models:
            if model is not None:
                policy = model.body if isinstance(model, ValueModel) else model
                policy.sequence_split = split
                shard(
                    model,
                    mesh,
                    cpu_offload=self.case.cpu_offload,
                    reshard_after_forward=self.case.reshards,
                )

    def _policy(self, lora_rank: int = 0) -> Policy:
        case = self.case
        small = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.1}
        net = tiny_net(case.kind, tie_word_embeddings=case.is_tied, **small)
        net = net.to(device=DEVICE, dtype=case.dtype)
        if lora_rank:
            model = ModelConfig(
                path="", lora_rank=lora_rank, lora_alpha=16, target_modules=["all-linear"]
            )
            add_adapter(net, model)
            for name, parameter in net.named_parameters():
                if "lora_B" in name:  # it starts at 0, where half of the gradients are 0
                    generator = torch.Generator().manual_seed(len(name))
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.data.copy_(0.05 * drawn)
        if case.is_checkpointed:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        return Policy(net, vocabulary=61).eval()

    def spread(
        self, batch: PackedBatch, call: Callable[[BatchShard], Any]
    ) -> tuple[list[BatchShard], list]:
        """What every rank made of its share."""
        shares = split_batch(batch, self.case.passes, ranks=self.ranks.world // self.shared)
        found = self.ranks.all(call(shares[self.ranks.rank // self.shared]))
        return shares, found[:: self.shared]

    def streams(self, batch: PackedBatch, call: Callable[[BatchShard], Any]) -> dict[str, Tensor]:
        return join_shards(*self.spread(batch, call), batch)

    def referred(self, share: BatchShard) -> dict[str, Tensor]:
        if self.reference is not None:
            return score_shard(self.reference, share, temperature=0.9, device=self.device)
        with adapter_off(self.policy):
            return self.actor.score_shard(share)

    def step(self, number: int) -> dict[str, Any]:
        """All that a training step computes, and what came out."""
        batch = recorded(number)
        if self.case.sequences is not None:
            batch = batch.take(range(self.case.sequences))
        found: dict[str, Any] = {}
        if number % 2 == 0:  # otherwise the update gives old log-probabilities
            found = self.streams(batch, lambda s: self.actor.score_shard(s, sum_pi_squared=True))
            noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(number))
            # Old log-probabilities that are a little off make ratios that clip.
            old = found["logp"] + 0.2 * noise
            batch = batch.with_streams(old_logp=old, rollout_logp=found["logp"])
        if self.case.objective.kl_loss_coef:
            found["ref"] = self.streams(batch, self.referred)["logp"]
            batch = batch.with_streams(ref_logp=found["ref"])
        if self.critic is not None:
            found["values"] = self.streams(batch, self.critic.score_shard)["values"]
            batch = batch.with_streams(values=found["values"])
            found["critic"] = self.critic_step(batch)
        found["actor"] = self.actor_step(batch, number)
        return found

    def critic_step(self, batch: PackedBatch) -> dict[str, float]:
        critic = self.critic
        assert critic is not None
        whole = critic.prepare_update(batch)
        done = merge_updates(*self.spread(whole, lambda s: critic.update_shard(s, lr=1e-3)))
        return {**done.metrics, "norm": done.stepped.grad_norm}

    def actor_step(self, batch: PackedBatch, number: int) -> dict[str, float]:
        objective, actor = self.case.objective, self.actor
        statistics: dict[str, Tensor] = {}
        if objective.needs_statistics:
            logp = self.streams(batch, actor.score_shard)["logp"]
            statistics = objective.statistics(policy_inputs(batch, logp), seed=number)
        whole, numbers = prepare_update(batch, objective, statistics)
        shares, done = self.spread(
            whole, lambda s: actor.update_shard(s, objective, lr=1e-3, statistics=numbers)
        )
        merged = merge_policy_updates(batch, shares, done)
        assert (merged.logp is None) == ("old_logp" in batch.streams)
        return {**merged.metrics, "norm": merged.stepped.grad_norm}

    def weights(self) -> dict[str, Tensor]:
        """Whole weights, on the first rank."""
        models = [self.policy] if self.critic is None else [self.policy, self.critic.model]
        return {
            f"{index}/{name}": weight.detach().to("cpu", copy=True)
            for index, model in enumerate(models)
            for name, weight in full_weights(model, bucket_bytes=4096)
        }

    def roles(self) -> dict[str, tuple[Any, MasterOptimizer]]:
        roles: dict[str, tuple[Any, MasterOptimizer]] = {
            "actor": (self.policy, self.actor.optimizer)
        }
        if self.critic is not None:
            roles["critic"] = (self.critic.model, self.critic.optimizer)
        return roles

    def save(self, folder: Path) -> None:
        if self.ranks.rank == 0:
            folder.mkdir(parents=True)
        self.ranks.all(None)
        for name, (model, optimizer) in self.roles().items():
            for part, state in role_state(name, model, optimizer).items():
                save_state(folder, part, state)

    def load(self, folder: Path) -> None:
        for name, (model, optimizer) in self.roles().items():
            load_role(folder, name, model, optimizer)


def train(case: Case, ranks: Ranks, mesh: DeviceMesh | None, folder: Path) -> dict[str, Any]:
    """A whole course; a checkpoint of its first half lies in `folder` then."""
    trainee = Trainee(case, ranks, mesh)
    steps: list[dict[str, Any]] = []
    for number in range(case.steps):
        if number == case.saved_at:
            trainee.save(folder)
        steps.append(trainee.step(number))
    return {"steps": steps, "weights": trainee.weights()}


def go_on(case: Case, ranks: Ranks, mesh: DeviceMesh | None, folder: Path) -> dict[str, Any]:
    """The second half, from a checkpoint of anybody."""
    trainee = Trainee(case, ranks, mesh)
    trainee.load(folder)
    steps = [trainee.step(number) for number in range(case.saved_at or 0, case.steps)]
    return {"steps": steps, "weights": trainee.weights()}


def refuses_a_broken_gradient(ranks: Ranks, mesh: DeviceMesh) -> None:
    """One token of one rank is NaN: no rank takes the step, and all take the next one."""
    trainee = Trainee(Case(objective=Objective(loss="vanilla")), ranks, mesh)
    batch = recorded(0)
    bad = batch.streams["advantages"].clone()
    bad[batch.layout.mask.nonzero()[0, 0]] = float("nan")
    before = trainee.weights()
    norm = trainee.actor_step(batch.with_streams(advantages=bad), 3)["norm"]
    assert norm != norm, "the norm is not a number on every rank"
    after = trainee.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainee.actor_step(batch, 3)["norm"] > 0
    assert all(not torch.equal(v, before[k]) for k, v in trainee.weights().items() if "lm_" in k)


def claim_host(rank: int) -> None:
    """NCCL refuses two ranks of one host on one GPU: each claims a host of its own."""
    if DEVICE == "cuda":
        os.environ |= {
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }


def run_world(root: Path, world: int, rank: int, suite: str) -> None:
    """Every case of the suite, and going on from what other worlds have saved."""
    claim_host(rank)
    address = f"file://{root}/meeting_{world}"
    mesh = join_ranks(rank, world, address, device=DEVICE, timeout_s=60)
    ranks = Ranks(rank=rank, world=world, mesh=mesh)
    results: dict[str, Any] = {}
    for name, case in SUITES[suite].items():
        own = mesh
        if 0 < case.fsdp_size < world:
            shape = mesh_shape(world, case.fsdp_size)
            own = dist.init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
        results[name] = train(case, ranks, own, root / f"world_{world}" / name)
        other = root / f"world_{BEFORE[world]}" / name
        if case.saved_at is not None:
            results[f"{name}, gone on"] = go_on(case, ranks, own, other)
    refuses_a_broken_gradient(ranks, mesh)
    if rank == 0:
        torch.save(results, root / f"results_{world}.pt")
    leave_ranks()


def main(root: Path, rank: int, suite: str) -> None:
    """Be a rank of a world of 4, then perhaps of one of 2."""
    torch.set_num_threads(1)
    for world in (4, 2):
        if rank < world:
            run_world(root, world, rank, suite)
