"""A step of a run on simulated GPUs: time, bytes and memory of every phase.

What is computed where follows the plan that `check` makes of the same configuration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import final

from luyen.base.errors import UserError
from luyen.config.catalog import ADV_ESTIMATORS, EstimatorFacts
from luyen.config.machine import Machine
from luyen.config.memory import MemoryPlan, plan_memory
from luyen.config.model_folder.config_json import ModelShape
from luyen.config.model_memory import is_offloaded, pool_share, trainable
from luyen.config.plan import (
    EMBEDDED_ENGINES,
    BatchPlan,
    Placement,
    devices_of_a_copy,
    has_teacher,
    is_off_policy,
    is_pure_distillation,
    needs_reference,
    reward_pool,
)
from luyen.config.schema.run import RunConfig
from luyen.config.simulation.cost import (
    Cost,
    GenerationWork,
    ModelCost,
    PassWork,
    ShardCost,
    ShardLayout,
)
from luyen.config.simulation.hardware import Hardware

_BF16 = 2
_SAVED = 14
"""Bytes of a checkpoint for each weight that learns: bf16, an fp32 master and two moments."""
_BUCKETS = 16
"""Buckets that weights are sent in."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLengths:
    """Tokens of rollouts and rows of a validation, which a configuration does not say.

    Example:
        >>> RolloutLengths(prompt=512, answer=768).answers(most=1024)
        (512, 1024)
    """

    prompt: int
    """Mean tokens of a prompt."""
    answer: int
    """Mean tokens of an answer."""
    validation_rows: int = 0
    """Rows of a validation."""

    def answers(self, *, most: int) -> tuple[int, int]:
        """The widest range around the mean that no answer leaves.

        Example:
            >>> RolloutLengths(prompt=512, answer=1024).answers(most=1024)
            (1024, 1024)
        """
        reach = min(most - self.answer, self.answer - 1)
        return self.answer - reach, self.answer + reach


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPhase:
    """A phase of a step on each device that it occupies.

    Example:
        >>> SimulatedPhase(name="update", cost=Cost(compute=1.0), memory_bytes=3).cost.bound
        'compute'
    """

    name: str
    """Name of the phase."""
    cost: Cost
    """Seconds of a step, by what they wait for."""
    memory_bytes: int | None = None
    """Most memory of a device; None where the phase needs none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A whole step.

    Example:
        Made by `simulate`, shown by `luyen plan --simulate`.
    """

    phases: tuple[SimulatedPhase, ...]
    """In the order of a step; validations and checkpoints by their share of a step."""
    hidden_s: float
    """Seconds of generation at the same time as training (`trainer.max_staleness`)."""
    gpus: int
    """Devices of all pools."""
    tokens: int
    """Tokens of all rollouts of a step, prompts counted for each."""
    rows_at_once: int
    """Sequences that a copy of the engine generates at once."""
    memory: MemoryPlan
    """Memory of each phase on a device."""
    remarks: tuple[str, ...]
    """What the times leave out, or were never compared with."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(phase.cost.seconds for phase in self.phases) - self.hidden_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per second and GPU."""
        return self.tokens / self.seconds / self.gpus


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What the costs of a step are computed from.

    Example:
        Made by `simulate`.
    """

    config: RunConfig
    """The configuration."""
    shape: ModelShape
    """Of the model."""
    batch: BatchPlan
    """Its batch arithmetic."""
    where: Placement
    """Its devices."""
    hardware: Hardware
    """What they are."""
    lengths: RolloutLengths
    """Tokens of its rollouts."""

    @property
    def learned(self) -> int:
        """Weights that learn."""
        return trainable(self.config, self.shape)

    @property
    def layout(self) -> ShardLayout:
        """How the actor's ranks hold the model."""
        fsdp, world = self.config.actor_rollout_ref.actor.fsdp_config, self.where.world_size
        return ShardLayout(
            world=world,
            share=pool_share(self.config, (world, 1)),
            ranks_per_sequence=self.batch.ranks_per_shard,
            frees_layers=fsdp.reshard_after_forward,
            is_offloaded=is_offloaded(self.config, self.where),
        )

    def layout_of(self, pool: tuple[int, int] | None) -> ShardLayout:
        """The same for a role with devices of its own; None: those of the actor."""
        if pool is None:
            return self.layout
        share = pool_share(self.config, pool)
        return ShardLayout(world=pool[0] * pool[1], share=share, ranks_per_sequence=1)

    def shards(self, layout: ShardLayout, *, learned: int) -> ShardCost:
        """Transfers of a model in that layout."""
        return ShardCost(shape=self.shape, hardware=self.hardware, layout=layout, learned=learned)

    @property
    def devices(self) -> int:
        """Devices of all pools."""
        pools = (self.where.rollout_pool, self.where.reference_pool, self.where.critic_pool)
        pools = (*pools, reward_pool(self.config))
        running = self.where.replicas * devices_of_a_copy(self.config)
        servers = running if self.config.actor_rollout_ref.rollout.server_urls else 0
        own = sum(nodes * each for nodes, each in filter(None, pools))
        return self.where.world_size + own + servers

    @property
    def replica_nodes(self) -> int:
        """Nodes with copies of the rollout engine."""
        devices = self.where.replicas * devices_of_a_copy(self.config)
        return ceil(devices / self.hardware.gpus_per_node)


def simulate(
    config: RunConfig,
    shape: ModelShape,
    batch: BatchPlan,
    where: Placement,
    *,
    hardware: Hardware,
    lengths: RolloutLengths,
) -> Simulation:
    """Time and memory of a step; a UserError for a run that cannot be simulated."""
    _refuse(config, where, lengths)
    run = SimulatedRun(
        config=config,
        shape=shape,
        batch=batch,
        where=where,
        hardware=hardware,
        lengths=lengths,
    )
    gpus = (hardware.memory_bytes,) * hardware.gpus_per_node
    memory = plan_memory(config, shape, batch, where, Machine(cpus=1, ram_bytes=1, gpu_bytes=gpus))
    phases = tuple(_phases(run, memory))
    training = sum(p.cost.seconds for p in phases if p.name not in ("generate", "publish"))
    is_apart = config.trainer.max_staleness > 0 and where.rollout_pool is not None
    return Simulation(
        phases=phases,
        hidden_s=min(phases[0].cost.seconds, training) if is_apart else 0.0,
        gpus=run.devices,
        tokens=batch.rollouts * (lengths.prompt + lengths.answer),
        rows_at_once=rows_at_once(run, memory),
        memory=memory,
        remarks=tuple(_remarks(run)),
    )


_PLANNED = {"reference": "log-probs", "critic": "update", "validate": "generate"}
"""Phase -> the phase of the memory plan it belongs to, unless it has one of its own."""


def _phases(run: SimulatedRun, memory: MemoryPlan) -> Iterator[SimulatedPhase]:
    """The phases that take time, in the order of a step."""
    peaks = {phase.name: phase.total for phase in memory.phases}
    rows = rows_at_once(run, memory)
    costs = [
        ("generate", _generate(run, rows)),
        ("score", Cost(host=run.batch.rollouts * run.hardware.rollout_time.value)),
        ("log-probs", _logprobs(run)),
        ("reference", _reference(run)),
        ("critic", _critic(run)),
        ("update", _update(run)),
        ("publish", publication(run)),
        ("validate", _validate(run, rows)),
        ("save", _save(run)),
    ]
    for name, cost in costs:
        if cost.seconds:
            peak = peaks.get(name, peaks.get(_PLANNED.get(name, "")))
            yield SimulatedPhase(name=name, cost=cost, memory_bytes=peak)


def _refuse(config: RunConfig, where: Placement, lengths: RolloutLengths) -> None:
    """A UserError where no closed form says how long a step takes."""
    trainer, rollout, data = config.trainer, config.actor_rollout_ref.rollout, config.data
    stage, device, name = trainer.stage, where.device, rollout.name
    if stage != "rl":
        why, fix = "steps of online runs are simulated", "see its memory with luyen check"
        raise UserError("trainer.stage", stage, why, fix)
    if device != "cuda":
        raise UserError("trainer.device", device, "GPUs are simulated", "set it to cuda")
    if name not in ("native", "vllm", "sglang"):
        why, fix = "its speed is not known", "native, vllm and sglang are simulated"
        raise UserError("actor_rollout_ref.rollout.name", name, why, fix)
    for option, mean, most in (
        ("--prompt-tokens", lengths.prompt, data.max_prompt_length),
        ("--response-tokens", lengths.answer, data.max_response_length),
    ):
        if not 1 <= mean <= most:
            why = f"a mean is between 1 and the most that the configuration allows, {most}"
            raise UserError(option, mean, why, "change it, or data.max_prompt_length and the like")


def rows_at_once(run: SimulatedRun, memory: MemoryPlan) -> int:
    """Sequences that one copy generates at once: as configured, or as many as there is room for."""
    batch, rollout = run.batch, run.config.actor_rollout_ref.rollout
    # All samples of a prompt are on one copy. The plan counts those of an even split.
    most = ceil(batch.prompts / run.where.replicas) * batch.samples_per_prompt
    planned = min(ceil(batch.rollouts / run.where.replicas), rollout.max_num_seqs)
    most = min(most, rollout.max_num_seqs)
    if rollout.server_urls or memory.kv_demand * most <= memory.kv_budget * planned:
        return most
    return max(1, planned * memory.kv_budget // memory.kv_demand)


def _generate(run: SimulatedRun, rows: int) -> Cost:
    """What the copy with the most prompts generates."""
    prompts = ceil(run.batch.prompts / run.where.replicas)
    return _generated(run, rows, prompts=prompts, samples=run.batch.samples_per_prompt)


def _generated(run: SimulatedRun, rows: int, *, prompts: int, samples: int) -> Cost:
    rollout, lengths = run.config.actor_rollout_ref.rollout, run.lengths
    work = GenerationWork(
        prompts=prompts,
        samples=samples,
        prompt=(lengths.prompt, lengths.prompt),
        new=lengths.answers(most=run.config.data.max_response_length),
        rows=rows,
        pass_tokens=rollout.max_num_batched_tokens,
    )
    cost = ModelCost(
        shape=run.shape,
        hardware=run.hardware,
        split=devices_of_a_copy(run.config),
        is_eager=rollout.enforce_eager,
    )
    return cost.generation(work)


def _passes(run: SimulatedRun, layout: ShardLayout, sequences: int) -> tuple[PassWork, int]:
    """The mean pass of a rank over its part of so many sequences, and how many passes there are."""
    batch, lengths, actor = run.batch, run.lengths, run.config.actor_rollout_ref.actor
    ranks = layout.ranks_per_sequence
    own = ceil(sequences / max(1, layout.world // ranks))
    prompts = ceil(own / batch.samples_per_prompt)
    read, scored = prompts * lengths.prompt, own * lengths.answer
    if actor.use_dynamic_bsz:
        longest = lengths.prompt + lengths.answer
        number = ceil(own / max(1, ranks * actor.ppo_max_token_len_per_gpu // longest))
    else:
        number = ceil(own / min(own, actor.ppo_micro_batch_size_per_gpu or 1))
    seen = read * lengths.prompt / 2 + scored * (lengths.prompt + lengths.answer / 2)
    tokens = ceil((read + scored) / ranks / number)
    work = PassWork(
        tokens=tokens, scored=ceil(scored / ranks / number), context=seen / (read + scored)
    )
    return work, number


def _scored(run: SimulatedRun, layout: ShardLayout) -> Cost:
    """Log-probabilities of the whole batch by one forward pass."""
    work, number = _passes(run, layout, run.batch.rollouts)
    shards = run.shards(layout, learned=0)
    device = ModelCost(shape=run.shape, hardware=run.hardware).forward(work)
    one = shards.around(device, learns=False) + shards.exchange(work.tokens, learns=False)
    return _launched(run, one, passes=1).times(number)


def _learned(run: SimulatedRun, layout: ShardLayout, *, learned: int, has_head: bool) -> Cost:
    """All optimizer steps of a step."""
    work, number = _passes(run, layout, run.batch.mini_batch_rollouts)
    if not has_head:
        work = PassWork(tokens=work.tokens, scored=0, context=work.context)
    model, shards = run.config.actor_rollout_ref.model, run.shards(layout, learned=learned)
    cost = ModelCost(shape=run.shape, hardware=run.hardware)
    trains_all = learned >= run.shape.parameters()
    recomputes = model.enable_gradient_checkpointing
    device = cost.forward(work) + cost.backward(work, trains_all=trains_all, recomputes=recomputes)
    one = shards.around(device, learns=True) + shards.exchange(work.tokens, learns=True)
    passes = _launched(run, one, passes=3 if recomputes else 2).times(number)
    return (passes + shards.optimizer_step()).times(run.batch.optimizer_steps)


def _launched(run: SimulatedRun, cost: Cost, *, passes: int) -> Cost:
    """The cost of a pass over all layers, which takes at least its launches by the host."""
    least = passes * run.shape.layers * run.hardware.launch_time.value
    return cost + Cost(latency=max(0.0, least - cost.seconds))


def needs_old_pass(config: RunConfig, estimator: EstimatorFacts | None) -> bool:
    """Whether old log-probabilities take a pass of their own before the update."""
    correction = config.algorithm.rollout_correction
    needs = estimator.needs if estimator and not is_pure_distillation(config) else ()
    is_corrected = correction.rollout_is is not None or correction.rollout_rs is not None
    is_off = is_off_policy(config) or is_corrected or config.algorithm.use_kl_in_reward
    is_needed = is_off or "old_logp" in needs or config.distill.on_policy
    return "sum_pi_squared" in needs or (is_needed and not correction.bypass_mode)


def _logprobs(run: SimulatedRun) -> Cost:
    estimator = ADV_ESTIMATORS.get(run.config.algorithm.adv_estimator)
    if not needs_old_pass(run.config, estimator):
        return Cost()
    return _scored(run, run.layout)


def _reference(run: SimulatedRun) -> Cost:
    """The reference, and a teacher, which is timed as if it had the actor's shape."""
    passes = Cost()
    if needs_reference(run.config):
        passes += _scored(run, run.layout_of(run.where.reference_pool))
    return passes + _scored(run, run.layout) if has_teacher(run.config) else passes


def _critic(run: SimulatedRun) -> Cost:
    """Values and the critic's update, as if it had the actor's shape without a vocabulary."""
    if all(role.name != "critic" for role in run.where.roles):
        return Cost()
    layout, weights = run.layout_of(run.where.critic_pool), run.shape.parameters()
    return _scored(run, layout) + _learned(run, layout, learned=weights, has_head=False)


def _update(run: SimulatedRun) -> Cost:
    return _learned(run, run.layout, learned=run.learned, has_head=True)


def publication(run: SimulatedRun) -> Cost:
    """New weights to every copy: gathered, through host memory, and into a server where it is one.

    In one process the embedded engine reads the weights that learn.
    """
    rollout, hardware, layout = run.config.actor_rollout_ref.rollout, run.hardware, run.layout
    size = (run.learned if run.config.actor_rollout_ref.model.lora_rank else 0) or (
        run.shape.parameters()
    )
    size *= _BF16
    cost = Cost()
    if run.where.runtime == "ray":
        sent = (layout.share - 1) / layout.share * size
        stages = [
            2 * size / hardware.host_rate.value,
            size / hardware.store_rate.value,
            size / hardware.node_rate.value if run.replica_nodes > 1 else 0.0,
        ]
        # Buckets pass through all stages at once; the first and the last wait for each.
        slowest = max(stages)
        host = slowest + (sum(stages) - slowest) / _BUCKETS
        cost += Cost(network=sent / hardware.ring_rate(layout.share), sent=sent, host=host)
    if rollout.name in EMBEDDED_ENGINES:
        return cost
    rates = {
        "folder": hardware.folder_rate.value,
        "ipc": hardware.ipc_rate.value,
        "group": hardware.adapter_rate(),
        "transfer": hardware.adapter_rate(),
    }
    is_network = rollout.server.transport in ("group", "transfer")
    into = (run.shape.parameters() * _BF16) / rates[rollout.server.transport]
    return cost + (Cost(network=into) if is_network else Cost(host=into))


def _validate(run: SimulatedRun, rows: int) -> Cost:
    """The share of a validation that a step has."""
    every, kwargs = run.config.trainer.test_freq, run.config.actor_rollout_ref.rollout.val_kwargs
    if every < 1 or not run.lengths.validation_rows:
        return Cost()
    answers = run.lengths.validation_rows * kwargs.n
    prompts = ceil(run.lengths.validation_rows / run.where.replicas)
    whole = _generated(run, rows, prompts=prompts, samples=kwargs.n)
    return (whole + Cost(host=answers * run.hardware.rollout_time.value)).times(1 / every)


def _save(run: SimulatedRun) -> Cost:
    """The share of a checkpoint that a step waits for."""
    every, hardware = run.config.trainer.save_freq, run.hardware
    if every < 1:
        return Cost()
    size = run.learned * _SAVED / run.layout.share
    if run.config.trainer.async_save is not False:
        return Cost(host=size / hardware.host_rate.value / every)
    written = size * min(run.layout.share, hardware.gpus_per_node)
    return Cost(host=written / hardware.disk_rate.value / every)


def _remarks(run: SimulatedRun) -> Iterator[str]:
    """What is in force and the simulated times do not depend on, or were never compared with."""
    config, where = run.config, run.where
    arr = config.actor_rollout_ref
    optim, idle = arr.actor.optim.name, where.replicas - run.batch.prompts
    found = {
        f"{idle} of {where.replicas} copies of the engine get no prompt": idle > 0,
        "experts: no mixture was run on a GPU": run.shape.experts > 1,
        "multi_turn.enable: a conversation is timed as one answer, tools take no time": (
            arr.rollout.multi_turn.enable
        ),
        "reward_model.enable: its passes take no time": config.reward.reward_model.enable,
        "filter_groups: prompts that are sampled again take no time": (
            config.algorithm.filter_groups.enable
        ),
        f"model.quantization: {arr.model.quantization} is timed as bf16": (
            arr.model.quantization != "none"
        ),
        f"optim.name: {optim} is timed as adamw": optim != "adamw",
        "actor.strategy: megatron is timed as fsdp2": arr.actor.strategy == "megatron",
        "rollout.deterministic: false is timed as true": not arr.rollout.deterministic,
        f"rollout.name: {arr.rollout.name} is timed as native, and its memory planned as such": (
            arr.rollout.name != "native"
        ),
    }
    return (words for words, is_so in found.items() if is_so)
