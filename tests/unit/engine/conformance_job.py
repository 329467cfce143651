"""What every training engine must do, by the methods of its protocol alone."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.checkpoint.tensors import save_state
from luyen.config.schema.actor_rollout_ref import FsdpConfig, OptimConfig
from luyen.config.schema.model import ModelConfig
from luyen.engine.actor import merge_policy_updates, prepare_update, router_statistics
from luyen.engine.batch import (
    REPLAYED_ROUTES,
    MicroBatching,
    PackedBatch,
    join_shards,
    split_batch,
)
from luyen.engine.fsdp import leave_ranks
from luyen.engine.sharded_state import merge_sums
from luyen.engine.step import merge_updates
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy, ValueModel
from luyen.runtime.training import RankPlace, ValueTraining, loads_on_host, training_engines
from tests.tiny_models import DEVICE, tiny_net
from tests.unit.engine.fsdp_cases import recorded
from tests.unit.engine.fsdp_job import claim_host

OPTIM = OptimConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.01)
OBJECTIVE = Objective(loss="vanilla", kl_loss_coef=0.05, entropy_coeff=0.01)
VALUES = ValueTraining(cliprange_value=0.5, aggregation="token-mean", scale=None)
STEPS, SAVED_AT = 4, 2


@dataclass(frozen=True, kw_only=True)
class Form:
    """An engine, what it is configured with, and the model it trains."""

    engine: str = "fsdp2"
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    target_modules: tuple[str, ...] = ("all-linear",)
    sequences: int | None = None
    is_checkpointed: bool = False
    router_aux_loss_coef: float = 0.0
    is_replayed: bool = False
    """Whether layers use experts that the batch says."""

    @property
    def alone(self) -> "Form":
        """The same model, trained by `single`."""
        return replace(self, engine="single", config={})


def make_policy(form: Form, *, lora_rank: int = 0, on_host: bool = False) -> Policy:
    small = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.1}
    net = tiny_net(form.kind, **{**small, **form.model})
    net.to(device="cpu" if on_host else DEVICE)
    if lora_rank:
        lora = ModelConfig(path="", lora_rank=lora_rank, target_modules=form.target_modules)
        add_adapter(net, lora)
        for name, parameter in net.named_parameters():
            if "lora_B" in name:  # it starts at 0, where half of the gradients are 0
                generator = torch.Generator().manual_seed(len(name))
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.05 * drawn)
    if form.is_checkpointed:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    place = torch.device(DEVICE) if on_host else None
    return Policy(net, vocabulary=61, device=place).eval()


class Course:
    """The models of a run on this rank, made by an engine, and what they learn."""

    def __init__(self, form: Form, place: RankPlace) -> None:
        config = FsdpConfig(**form.config)
        self.form, self.place = form, place
        together = config.ulysses_sequence_parallel_size * config.tensor_parallel_size
        self.together = min(together, place.ranks)
        engine = training_engines.get(form.engine)(place, config)
        self.passes = MicroBatching(max_tokens=64)
        on_host = loads_on_host(form.engine, str(place.device))
        policy = make_policy(form, lora_rank=form.lora_rank, on_host=on_host)
        self.actor = engine.actor(policy, OPTIM, self.passes, temperature=0.9)
        self.reference = None
        if not form.lora_rank:
            frozen = make_policy(form, on_host=on_host).requires_grad_(False)
            self.reference = engine.frozen(frozen, temperature=0.9)
        value = ValueModel(make_policy(form, on_host=on_host))
        value.value.weight.data.fill_(0.05)
        self.critic = engine.critic(value, OPTIM, self.passes, VALUES)

    def all(self, mine: Any) -> list[Any]:
        if self.place.ranks == 1:
            return [mine]
        found: list[Any] = [None] * self.place.ranks
        dist.all_gather_object(found, mine)
        return found

    def spread(self, batch: PackedBatch, call: Any) -> tuple[list[Any], list[Any]]:
        shards = split_batch(batch, self.passes, ranks=self.place.ranks // self.together)
        found = self.all(call(shards[self.place.rank // self.together]))
        return shards, found[:: self.together]

    def streams(self, batch: PackedBatch, call: Any) -> dict[str, Tensor]:
        return join_shards(*self.spread(batch, call), batch)

    def step(self, number: int) -> dict[str, Any]:
        batch = recorded(number)
        if self.form.sequences is not None:
            batch = batch.take(range(self.form.sequences))
        if self.form.is_replayed:
            batch = batch.with_streams(**{REPLAYED_ROUTES: self.routes(batch.tokens, number)})
        scored = self.streams(batch, lambda s: self.actor.score_shard(s, sum_pi_squared=True))
        base = self.reference.score_shard if self.reference else self.actor.base_scores
        ref = self.streams(batch, base)["logp"]
        values = self.streams(batch, self.critic.score_shard)["values"]
        old = scored["logp"] + 0.2 * torch.sin(torch.arange(len(ref)) + number)
        streams = {"old_logp": old, "rollout_logp": scored["logp"], "ref_logp": ref}
        batch = batch.with_streams(**streams, values=values)
        whole = self.critic_batch(batch)
        fitted = merge_updates(*self.spread(whole, lambda s: self.critic.update_shard(s, lr=1e-3)))
        objective = replace(OBJECTIVE, router_aux_loss_coef=self.form.router_aux_loss_coef)
        whole, numbers = prepare_update(batch, objective, {})
        if objective.router_aux_loss_coef:
            _, counts = self.spread(whole, self.actor.expert_counts)
            numbers |= router_statistics(counts, len(batch.tokens))
        shards, done = self.spread(
            whole,
            lambda s: self.actor.update_shard(s, objective, lr=1e-3, statistics=numbers),
        )
        learned = merge_policy_updates(batch, shards, done)
        return {
            "streams": {**scored, "ref": ref, "values": values},
            "actor": {**learned.metrics, "norm": learned.stepped.grad_norm},
            "critic": {**fitted.metrics, "norm": fitted.stepped.grad_norm},
        }

    def routes(self, tokens: Tensor, number: int) -> Tensor:
        """Experts of tokens, of equal ones the same (prompts are shared); of some none is known."""
        config: Any = self.actor.policy.model.config
        generator = torch.Generator().manual_seed(number)
        size = (config.vocab_size, config.num_hidden_layers, config.num_experts)
        order = torch.rand(size, generator=generator).argsort(-1)
        known = order[..., : config.num_experts_per_tok].to(torch.uint8)
        known[::7] = 255
        return known.to(tokens.device)[tokens]

    def critic_batch(self, batch: PackedBatch) -> PackedBatch:
        from luyen.algorithms.aggregation import aggregation_weights

        weights = aggregation_weights("token-mean", batch.rollouts, loss_scale_factor=None)
        return batch.with_streams(loss_weight=weights)

    def digests(self) -> dict[str, str]:
        """Of all weights, on all ranks together."""
        is_first = self.place.rank == 0
        sums = self.actor.weight_sums(is_first=is_first)
        return merge_sums(self.all({**sums, **self.critic.weight_sums(is_first=is_first)}))

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for bucket in self.actor.weights():
            found |= {name: weight.clone() for name, weight in bucket.items()}
        return found

    def save(self, folder: Path) -> None:
        if self.place.rank == 0:
            folder.mkdir(parents=True)
        self.all(None)
        for part, state in {**self.actor.state(), **self.critic.state()}.items():
            save_state(folder, part, state)

    def load(self, folder: Path) -> None:
        self.actor.load(folder)
        self.critic.load(folder)


def run(form: Form, place: RankPlace, folder: Path, before: Path | None) -> dict[str, Any]:
    """A course; from step 2 on it is continued in new models, from a checkpoint of its own.

    `before`: a checkpoint of `single`, which is loaded too.
    """
    course = Course(form, place)
    found: dict[str, Any] = {"digests": [course.digests()], "steps": []}
    for number in range(STEPS):
        if number == SAVED_AT:
            course.save(folder)
            found["digests"].append(course.digests())
        found["steps"].append(course.step(number))
    found["weights"] = course.weights()
    found["after"] = course.digests()
    course.load(folder)
    found["loaded"] = course.digests()
    found["again"] = [course.step(number) for number in range(SAVED_AT, STEPS)]
    if before is not None:
        course.load(before)
        found["loaded of single"] = course.digests()
        found["continued"] = [course.step(number) for number in range(SAVED_AT, STEPS)]
    return found


def be_rank(root: Path, world: int, rank: int, forms: dict[str, Form]) -> None:
    """A rank of a world for each form."""
    torch.set_num_threads(1)
    claim_host(rank)
    for index, (name, form) in enumerate(forms.items()):
        address = f"file://{root}/meeting_{world}_{index}"
        place = RankPlace(device=DEVICE, rank=rank, ranks=world, address=address, timeout_s=60)
        own = root / f"world_{world}_{index}"
        found = run(form, place, own, root / "single" / name)
        if rank == 0:
            torch.save(found, root / f"{name}_{world}.pt")
        leave_ranks()
