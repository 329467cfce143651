"""Training engines: how the models of a run lie on its ranks, and what learns there.

`actor_rollout_ref.actor.strategy` names an engine. A plugin may register another one, which lays
out models in its own way (`ModelsOnRanks`), or makes learners of its own. All ranks call every
method of an engine and of a learner at the same time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from luyen.algorithms.objective import Objective
from luyen.base.registry import Registry
from luyen.config.optimizer_memory import is_optimizer_offloaded
from luyen.config.schema.actor_rollout_ref import FsdpConfig, OptimConfig
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import BatchShard, MicroBatching
from luyen.engine.critic import CriticEngine
from luyen.engine.fsdp import Shardable, join_ranks, shard_as
from luyen.engine.logprobs import FrozenPolicy
from luyen.engine.optim import ComputeWeights, MasterOptimizer, build_optimizer
from luyen.engine.sequence_parallel import divide_sequences
from luyen.engine.sharded_state import (
    ShardSums,
    load_role,
    restore_role,
    role_state,
    role_weights,
    shard_sums,
)
from luyen.engine.step import ShardUpdateResult
from luyen.models.policy import Policy, ValueModel

# What learns on a rank.


class Learner(Protocol):
    """A model that learns, or this rank's part of it: its state and its digests."""

    def weight_sums(self, *, is_first: bool) -> ShardSums:
        """This rank's parts of the digests of trained weights and masters.

        `is_first`: tensors that every rank has whole are counted here.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Parts of a checkpoint by name; names, types and whole shapes are those of one device."""
        ...

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any number of ranks and of any engine."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a copy of `state` in place, where no tensor is sharded."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLearner:
    """State and digests of a model of ours and its optimizer, as those of a role.

    Example:
        >>> sorted(RoleLearner.__slots__)
        ['model', 'name', 'optimizer']
    """

    name: str
    """The role: its part of a checkpoint."""
    model: nn.Module
    """What learns."""
    optimizer: MasterOptimizer
    """Its optimizer."""

    def weight_sums(self, *, is_first: bool) -> ShardSums:
        """This rank's parts of the digests of trained weights and masters."""
        weights = role_weights(self.name, self.model, self.optimizer)
        return shard_sums(weights, is_first=is_first)

    def state(self) -> dict[str, Any]:
        """Parts of a checkpoint by name."""
        return role_state(self.name, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any number of ranks."""
        load_role(folder, self.name, self.model, self.optimizer)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a copy of `state` in place, where the model is not sharded."""
        restore_role(state, self.name, self.model, self.optimizer)


class PolicyLearner(Learner, Protocol):
    """The policy that learns."""

    @property
    def policy(self) -> Policy:
        """The model; in one process the embedded rollout engine generates with it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        ...

    def score_shard(
        self, shard: BatchShard, *, entropy: bool = False, sum_pi_squared: bool = False
    ) -> dict[str, Tensor]:
        """Log-probabilities of the tokens of a shard, and the streams that are requested."""
        ...

    def base_scores(self, shard: BatchShard) -> dict[str, Tensor]:
        """Log-probabilities of the model without its adapter."""
        ...

    def expert_counts(self, shard: BatchShard) -> Tensor:
        """`[layer, expert]` choices of each expert of a mixture for the tokens of a shard.

        It is called where the objective has a load-balance loss.
        """
        ...

    def update_shard(
        self,
        shard: BatchShard,
        objective: Objective,
        *,
        lr: float,
        statistics: Mapping[str, Tensor],
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch from `prepare_update`."""
        ...

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Whole trained weights in buckets, for rollout engines; ranks but the first yield none."""
        ...


class ValueLearner(Learner, Protocol):
    """The critic."""

    def score_shard(self, shard: BatchShard) -> dict[str, Tensor]:
        """The stream `values`."""
        ...

    def update_shard(self, shard: BatchShard, *, lr: float) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch from `CriticEngine.prepare_update`."""
        ...


# Engines.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank a process is, and where it meets the other ranks.

    Example:
        >>> RankPlace(device="cpu").ranks
        1
    """

    device: str
    """cpu or cuda."""
    rank: int = 0
    """This process."""
    ranks: int = 1
    """How many there are."""
    address: str | None = None
    """Where the process group is made; None: a process alone needs none."""
    timeout_s: float = 1800.0
    """Timeout of a collective."""

    @property
    def pass_device(self) -> torch.device | None:
        """Where passes run, if weights may be elsewhere; None: where the weights are."""
        if self.address is None or self.device != "cuda":
            return None
        return torch.device("cuda", torch.cuda.current_device())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTraining:
    """How the critic learns.

    Example:
        >>> ValueTraining(cliprange_value=None, aggregation="token-mean", scale=None).aggregation
        'token-mean'
    """

    cliprange_value: float | None
    """How far a value may move."""
    aggregation: str
    """How losses of tokens become one number."""
    scale: float | None
    """Divisor of seq-mean-token-sum-norm."""


class TrainingEngine(Protocol):
    """Lays the models of a run over its ranks; every model is loaded whole, on every rank."""

    def actor(
        self, policy: Policy, optim: OptimConfig, passes: MicroBatching, *, temperature: float
    ) -> PolicyLearner:
        """The policy that learns."""
        ...

    def critic(
        self, model: ValueModel, optim: OptimConfig, passes: MicroBatching, how: ValueTraining
    ) -> ValueLearner:
        """The critic."""
        ...

    def frozen(self, policy: Policy, *, temperature: float) -> FrozenPolicy:
        """A model that only scores: the reference, or a teacher."""
        ...


def loads_on_host(engine: str, device: str) -> bool:
    """Whether models for a training engine are loaded into host memory: it moves their parts."""
    return device == "cuda" and bool(training_engines.facts(engine).get("loads_on_host"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOnRanks:
    """An engine of our learners over models that `lay_out` places in its own way.

    Example:
        >>> ModelsOnRanks(lay_out=lambda model: None).device is None
        True
    """

    lay_out: Callable[[Shardable], ComputeWeights | None]
    """Gives a rank its part of a model, in place, and the weights that passes compute with; None:
    they are the model's own."""
    device: torch.device | None = None
    """Where passes run; None: where the weights are."""
    offload: bool = False
    """Whether optimizers of whole weights are in host memory."""

    def actor(
        self, policy: Policy, optim: OptimConfig, passes: MicroBatching, *, temperature: float
    ) -> ActorEngine:
        """The policy that learns."""
        compute = self.lay_out(policy)
        optimizer = build_optimizer(policy, optim, offload=self.offload, compute=compute)
        return ActorEngine(policy, optimizer, passes, temperature=temperature, device=self.device)

    def critic(
        self, model: ValueModel, optim: OptimConfig, passes: MicroBatching, how: ValueTraining
    ) -> CriticEngine:
        """The critic."""
        compute = self.lay_out(model)
        return CriticEngine(
            model,
            build_optimizer(model, optim, offload=self.offload, compute=compute),
            passes,
            cliprange_value=how.cliprange_value,
            aggregation=how.aggregation,
            loss_scale_factor=how.scale,
            device=self.device,
        )

    def frozen(self, policy: Policy, *, temperature: float) -> FrozenPolicy:
        """A model that only scores."""
        self.lay_out(policy)
        return FrozenPolicy(policy=policy, temperature=temperature, device=self.device)


MakeTrainingEngine: TypeAlias = Callable[[RankPlace, FsdpConfig], TrainingEngine]
"""Called once in every training process, before models are loaded."""

training_engines: Registry[MakeTrainingEngine] = Registry(
    "training engine", "actor_rollout_ref.actor.strategy"
)


@training_engines.register("single")
def single(place: RankPlace, config: FsdpConfig) -> TrainingEngine:
    """Whole models on one device."""
    assert place.ranks == 1, "the configuration was checked"
    if place.address is not None:
        join_ranks(0, 1, place.address, device=place.device, timeout_s=place.timeout_s)
    return ModelsOnRanks(
        lay_out=lambda _: None,
        device=place.pass_device,
        offload=is_optimizer_offloaded(config, place.device, place.ranks),
    )


@training_engines.register("fsdp2", splits=True, loads_on_host=True)
def fsdp2(place: RankPlace, config: FsdpConfig) -> TrainingEngine:
    """Models sharded with PyTorch's FSDP2."""
    assert place.address is not None, "ranks meet somewhere"
    mesh = join_ranks(
        place.rank,
        place.ranks,
        place.address,
        device=place.device,
        fsdp_size=config.fsdp_size,
        tensor_size=config.tensor_parallel_size,
        timeout_s=place.timeout_s,
    )
    split = divide_sequences(
        place.ranks, config.ulysses_sequence_parallel_size, timeout_s=place.timeout_s
    )
    return ModelsOnRanks(
        lay_out=lambda model: shard_as(model, mesh, config, split), device=place.pass_device
    )


@training_engines.register("megatron", splits=True, package="megatron", extra="megatron")
def megatron(place: RankPlace, config: FsdpConfig) -> TrainingEngine:
    """Layers of megatron-core; masters and moments are sharded over ranks."""
    from luyen.engine.megatron.lay_out import lay_out
    from luyen.engine.megatron.model import join_megatron_ranks

    assert place.address is not None, "ranks meet somewhere"
    ranks = join_megatron_ranks(
        place.rank,
        place.ranks,
        place.address,
        device=place.device,
        tensor_size=config.tensor_parallel_size,
        expert_size=config.expert_parallel_size,
        timeout_s=place.timeout_s,
    )
    return ModelsOnRanks(lay_out=lambda model: lay_out(model, ranks), device=place.pass_device)
