"""Steps on given rows by one process or by a rank of a world, for every kind of learner."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luyen.algorithms.preference.step import PreferenceObjective
from luyen.checkpoint.tensors import save_state
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.config.schema.model import ModelConfig
from luyen.engine.batch import MicroBatching, OfflineBatch, PackedBatch, join_shards, split_batch
from luyen.engine.distill import DistillEngine, DistillObjective
from luyen.engine.fsdp import join_ranks, leave_ranks, shard
from luyen.engine.logprobs import FrozenPolicy
from luyen.engine.optim import MasterOptimizer
from luyen.engine.preference import PreferenceTrainer
from luyen.engine.reward_model import RewardModelEngine, RewardTrainer
from luyen.engine.sequence_parallel import divide_sequences
from luyen.engine.sharded_state import full_weights, load_role, merge_sums, role_state
from luyen.engine.step import RowLearner, UpdateResult, merge_updates
from luyen.engine.supervised import SupervisedEngine, TokenAggregation
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy
from luyen.models.reward_model import RewardModel
from luyen.runtime.offline import OfflineWorker
from tests.tiny_models import tiny_judge_net, tiny_net, tiny_policy
from tests.unit.engine.test_preference import offline_batch as pairs
from tests.unit.engine.test_reward_model import OBJECTIVES
from tests.unit.engine.test_reward_model import offline_batch as judged

STEPS, SAVED_AT = 3, 1
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A learner, and how its steps are cut."""

    kind: str
    lora_rank: int = 0
    dtype: torch.dtype = torch.float32
    sequence_ranks: int = 1
    rows: int = 3
    """Pairs of a step; with one of them, two of four ranks have nothing to do."""


CASES = {
    "supervised": Case(kind="sft"),
    "supervised, one pair": Case(kind="sft", rows=1),
    "supervised, divided sequences": Case(kind="sft", sequence_ranks=2),
    "preference": Case(kind="preference"),
    "preference with an adapter": Case(kind="preference", lora_rank=4),
    "reward model": Case(kind="reward"),
    "reward model in bf16": Case(kind="reward", dtype=torch.bfloat16),
    "reward model with an adapter": Case(kind="reward", lora_rank=4),
    "distillation": Case(kind="distill"),
    "distillation, one pair": Case(kind="distill", rows=1),
}


class World:
    """The learner of all ranks for whole batches: each computes its shard and hears the rest."""

    def __init__(self, worker: OfflineWorker, passes: MicroBatching, world: int, shared: int):
        self.worker, self.passes = worker, passes
        self.world, self.shared = world, min(shared, world)

    def all(self, mine: Any) -> list[Any]:
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def spread(self, batch: PackedBatch, call: Callable[..., Any]) -> tuple[Any, list[Any]]:
        passes = self.passes.on_ranks(self.shared)
        shards = split_batch(batch, passes, ranks=self.world // self.shared)
        mine = call(shards[self.worker.rank // self.shared])
        return shards, self.all(mine)[:: self.shared]

    def scores(self, batch: PackedBatch, *, dropout_key: int | None = None) -> dict[str, Tensor]:
        found = self.spread(batch, lambda s: self.worker.scores(s, dropout_key=dropout_key))
        return join_shards(*found, batch)

    def reference_scores(self, batch: PackedBatch) -> dict[str, Tensor]:
        return join_shards(*self.spread(batch, self.worker.reference_scores), batch)

    def update(
        self, batch: PackedBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        return merge_updates(
            *self.spread(batch, lambda s: self.worker.update(s, lr=lr, dropout_key=dropout_key))
        )


def adapter(net: Any, rank: int, task: str = "CAUSAL_LM") -> None:
    """A new one whose second half is not 0, so that all of it has gradients."""
    model = ModelConfig(path="", lora_rank=rank, lora_alpha=8, target_modules=("all-linear",))
    add_adapter(net, model, task=task)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def policy_of(case: Case) -> Policy:
    net = tiny_net(initializer_range=0.1)
    if case.lora_rank:
        adapter(net, case.lora_rank)
    return Policy(net, vocabulary=61).eval()


def worker_of(case: Case, rank: int, sharded: Callable[[Any], None]) -> OfflineWorker:
    learner: RowLearner
    reference = None
    if case.kind == "reward":
        net = tiny_judge_net(dtype=case.dtype, initializer_range=0.1)
        if case.lora_rank:
            adapter(net, case.lora_rank, "SEQ_CLS")
            net.get_submodule("score").requires_grad_(True)
        model = RewardModel(net).eval()
        sharded(model)
        learner = RewardModelEngine(model, MasterOptimizer(model.parameters(), OPTIM))
        return OfflineWorker(learner=learner, rank=rank)
    policy, other = policy_of(case), tiny_policy("qwen2", seed=9, initializer_range=0.1)
    sharded(policy)
    sharded(other.requires_grad_(False))
    optimizer = MasterOptimizer(policy.parameters(), OPTIM)
    if case.kind == "distill":
        learner = DistillEngine(policy, optimizer, other, DistillObjective(nll_weight=0.2))
    else:
        learner = SupervisedEngine(policy, optimizer, measures_accuracy=True)
    if case.kind == "preference" and not case.lora_rank:
        reference = FrozenPolicy(policy=other, temperature=1.0)
    return OfflineWorker(learner=learner, reference=reference, rank=rank)


class Trainee:
    """A learner, its data and the steps that are made of both."""

    def __init__(self, case: Case, rank: int, world: int, mesh: Any) -> None:
        split = divide_sequences(world, min(case.sequence_ranks, world), timeout_s=60.0)

        def sharded(model: Any) -> None:
            if isinstance(model, Policy):
                model.sequence_split = split
            if mesh is not None:
                shard(model, mesh)

        self.case = case
        self.worker = worker_of(case, rank, sharded)
        passes = MicroBatching(max_tokens=14 // min(case.sequence_ranks, world))
        self.learner = World(self.worker, passes, world, case.sequence_ranks)
        self.first = merge_sums(self.learner.all(self.worker.reference_sums()))
        """Digests of the reference: a policy of its own, or what the learner begins with."""

    def rows(self) -> OfflineBatch:
        given = judged("bradley_terry") if self.case.kind == "reward" else pairs("pair")
        cut = range(2 * self.case.rows)
        return replace(given, batch=given.batch.take(cut)) if self.case.rows < 3 else given

    def step(self) -> dict[str, float]:
        given = self.rows()
        if self.case.kind == "reward":
            trainer = RewardTrainer(self.learner, OBJECTIVES["bradley_terry"])
            measured = trainer.measure(given)
            done = trainer.update(given, lr=1e-3)
        elif self.case.kind == "preference":
            judge = PreferenceTrainer(self.learner, PreferenceObjective(losses=("sigmoid",)))
            judge.reference = lambda one: judge.sums(self.learner.reference_scores, one)
            measured = judge.measure(given)
            done = judge.update(given, lr=1e-3)
        else:
            batch = TokenAggregation().weigh(given.batch)
            found = self.learner.scores(batch)
            measured = {n: float(x[batch.layout.mask].mean()) for n, x in found.items()}
            done = self.learner.update(batch, lr=1e-3)
        return {
            **{f"measured/{name}": value for name, value in measured.items()},
            **done.metrics,
            "norm": done.stepped.grad_norm,
        }

    def results(self, steps: list[dict[str, float]]) -> dict[str, Any]:
        model = self.worker.learner.model
        weights = {n: w.detach().clone() for n, w in full_weights(model)}
        digests = merge_sums(self.learner.all(self.worker.weight_sums()))
        return {"steps": steps, "weights": weights, "digests": digests, "first": self.first}

    def save(self, folder: Path) -> None:
        if self.worker.rank == 0:
            folder.mkdir(parents=True)
        self.learner.all(None)
        for part, state in role_state("actor", *self._learning()).items():
            save_state(folder, part, state)

    def load(self, folder: Path) -> None:
        load_role(folder, "actor", *self._learning())

    def _learning(self) -> tuple[Any, MasterOptimizer]:
        return self.worker.learner.model, self.worker.learner.optimizer


def train(case: Case, rank: int, world: int, mesh: Any, folder: Path) -> dict[str, Any]:
    """A whole course, saved in `folder` after its first step."""
    trainee, steps = Trainee(case, rank, world, mesh), list[dict[str, float]]()
    for number in range(STEPS):
        if number == SAVED_AT:
            trainee.save(folder)
        steps.append(trainee.step())
    return trainee.results(steps)


def go_on(case: Case, rank: int, world: int, mesh: Any, folder: Path) -> dict[str, Any]:
    """The rest of it, from a checkpoint of any world."""
    trainee = Trainee(case, rank, world, mesh)
    trainee.load(folder)
    return trainee.results([trainee.step() for _ in range(SAVED_AT, STEPS)])


def main(root: Path, rank: int) -> None:
    """Be a rank of a world of 4, then perhaps of one of 2, which goes on from the first."""
    torch.set_num_threads(1)
    for world, before in ((4, 1), (2, 4)):
        if rank >= world:
            continue
        mesh = join_ranks(rank, world, f"file://{root}/meeting_{world}", timeout_s=60)
        results: dict[str, Any] = {}
        for name, case in CASES.items():
            results[name] = train(case, rank, world, mesh, root / f"world_{world}" / name)
            earlier = root / f"world_{before}" / name
            results[f"{name}, gone on"] = go_on(case, rank, world, mesh, earlier)
        if rank == 0:
            torch.save(results, root / f"results_{world}.pt")
        leave_ranks()
