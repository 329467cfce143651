"""Memory of each phase of a step on one device, from the model's shape and the batch plan.

Closed-form estimates at the longest sequences. Weights, gradients and optimizer state are exact for
the layouts the training engine uses. A phase is its largest moment: what never exists together is
never added up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import final

from luyen.config.machine import Machine
from luyen.config.model_folder.config_json import ModelShape, read_shape
from luyen.config.model_memory import (
    PassMemory,
    PassTokens,
    StaticMemory,
    critic_bytes,
    divided_shape,
    is_offloaded,
    pool_share,
    static_memory,
    trainable,
)
from luyen.config.plan import (
    BatchPlan,
    Placement,
    ranks_per_replica,
    reward_pool,
    uses_running_servers,
)
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.run import RunConfig

# The reward model on one device.

PART = "reward model"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelMemory:
    """Bytes of a reward model.

    Example:
        >>> where = {"has_own_devices": False, "stays_on_device": True}
        >>> RewardModelMemory(weights=10, activations=2, **where).colocated()
        {'reward model': 10}
    """

    weights: int
    """All weights of one copy."""
    activations: int
    """What its largest pass has at once."""
    has_own_devices: bool
    """Whether its devices are its own."""
    stays_on_device: bool
    """Whether weights stay on the device while nothing is scored."""

    def colocated(self) -> dict[str, int]:
        """Bytes it takes on shared devices while other roles work."""
        is_there = bool(self.weights) and self.stays_on_device and not self.has_own_devices
        return {PART: self.weights} if is_there else {}

    def scoring(self, shared: dict[str, int]) -> dict[str, int]:
        """Bytes on its device while it scores; empty without a reward model."""
        if not self.weights:
            return {}
        own = {PART: self.weights, "activations": self.activations}
        return own if self.has_own_devices else {**shared, **own}


NO_REWARD_MODEL = RewardModelMemory(
    weights=0, activations=0, has_own_devices=True, stays_on_device=False
)


def reward_model_memory(
    config: RunConfig, where: Placement, largest: PassMemory
) -> RewardModelMemory:
    """Of the reward model of a run; 0 where there is none, or its sizes are not known here."""
    reward_model = config.reward.reward_model
    if not reward_model.enable or reward_model.model_path is None:
        return NO_REWARD_MODEL
    shape = read_shape(ModelConfig(path=reward_model.model_path))
    if shape is None:
        return NO_REWARD_MODEL
    width = 2 if where.device == "cuda" else 4
    read = reward_model.rollout.max_num_batched_tokens
    tokens = PassTokens(packed=read, padded=read, computed=read, scored=0)
    one_pass = replace(largest, shape=shape, tokens=tokens, width=width)
    has_own_devices = reward_pool(config) is not None
    offload = (
        not has_own_devices if reward_model.param_offload is None else reward_model.param_offload
    )
    embedding = shape.vocab * shape.hidden
    # A head of one number takes the place of the vocabulary's.
    weights = shape.layers * shape.layer_parameters() + embedding + 2 * shape.hidden
    return RewardModelMemory(
        weights=weights * width,
        activations=one_pass.inside(),
        has_own_devices=has_own_devices,
        stays_on_device=where.device == "cpu" or not offload,
    )


_FP32 = 4
_PAGE = 64
"""Tokens of a page of keys and values on a GPU."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes of one phase on one device, by what they are for.

    Example:
        >>> PhaseMemory(name="update", parts={"weights": 10, "gradients": 20}).total
        30
    """

    name: str
    """generate, judge, log-probs or update."""
    parts: dict[str, int]
    """Bytes by purpose."""

    @property
    def total(self) -> int:
        """Bytes of the phase."""
        return sum(self.parts.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Every phase, the peak, and whether the device can hold it.

    Example:
        >>> MemoryPlan(phases=(PhaseMemory(name="update", parts={"weights": 3}),), device_bytes=2,
        ...            kv_budget=0, kv_demand=0).fits
        False
    """

    phases: tuple[PhaseMemory, ...]
    """In the order of a step."""
    device_bytes: int
    """Memory of one device."""
    kv_budget: int
    """Bytes the KV cache may take."""
    kv_demand: int
    """Bytes the KV cache would take if every sequence that may run were of full length."""

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether the peak stays below the device's memory."""
        return self.peak.total <= self.device_bytes


def plan_memory(
    config: RunConfig, shape: ModelShape, batch: BatchPlan, where: Placement, machine: Machine
) -> MemoryPlan:
    """Bytes of each phase on one device; servers that run already have memory of their own."""
    width = _compute_width(config, where.device)
    keeps = static_memory(config, shape, where, width)
    is_split = where.rollout_pool is not None
    training = keeps.training if is_split else keeps.colocated()
    generation = keeps.generation if is_split else training
    capacity = machine.device_bytes(where.device)
    largest = PassMemory(
        shape=shape,
        model=config.actor_rollout_ref.model,
        tokens=PassTokens.of(config, batch),
        width=width,
        device=where.device,
    )
    ranks = config.actor_rollout_ref.actor.fsdp_config.tensor_parallel_size
    divided = replace(largest, shape=divided_shape(shape, ranks))
    update = _update(config, shape, batch, where, keeps, divided)
    if config.trainer.stage != "rl":
        alone = _largest("update", training, update)
        return MemoryPlan(phases=(alone,), device_bytes=capacity, kv_budget=0, kv_demand=0)
    reward_model = reward_model_memory(config, where, largest)
    training = training | reward_model.colocated()
    generation = generation if is_split else training
    is_here = not uses_running_servers(config)
    demand = _kv_demand(config, shape, batch, where, width) if is_here else 0
    moments = _generate(config, shape, batch, largest) if is_here else ()
    budget = _kv_budget(config, where, generation, capacity)
    cache = {"kv cache": min(demand, budget)}
    after = _between(config, where, training, cache)
    scoring = reward_model.scoring(after)
    phases = (
        _largest("generate", {**generation, **cache}, moments),
        *([PhaseMemory(name="judge", parts=scoring)] if scoring else []),
        _largest("log-probs", after, _score(keeps, divided)),
        _largest("update", after, update),
        *_pools(config, shape, where, divided),
    )
    return MemoryPlan(phases=phases, device_bytes=capacity, kv_budget=budget, kv_demand=demand)


def _pools(
    config: RunConfig, shape: ModelShape, where: Placement, largest: PassMemory
) -> Iterator[PhaseMemory]:
    """On devices of their own: the reference that scores, and the critic that learns."""
    weights, width = shape.parameters(), largest.width
    if where.reference_pool is not None:
        share = pool_share(config, where.reference_pool)
        moments = (
            {"activations": largest.inside()},
            {"logits": largest.head(is_learning=False)},
        )
        yield _largest("reference", {"reference": weights * width // share}, moments)
    if where.critic_pool is not None:
        share = pool_share(config, where.critic_pool)
        kept = critic_bytes(config, shape, width=width, share=share)
        passes = {"gradients": weights * _FP32 // share, "activations": largest.forward_bytes()}
        yield _largest("critic", {"critic": kept}, (passes,))


def _between(
    config: RunConfig, where: Placement, training: dict[str, int], cache: dict[str, int]
) -> dict[str, int]:
    """What the training devices hold between generations: a cache that is kept, idle weights."""
    rollout = config.actor_rollout_ref.rollout
    gives_back = rollout.free_cache_engine and config.trainer.max_staleness == 0
    if rollout.name == "vllm" and where.device == "cpu":
        gives_back = False
    if rollout.name == "hf" or where.rollout_pool is not None:
        return training
    if not gives_back:
        return {**training, **cache}
    # A vLLM server that sleeps has its weights in host memory; one of SGLang keeps them.
    return {part: n for part, n in training.items() if part != "server" or rollout.name != "vllm"}


def _kv_budget(
    config: RunConfig, where: Placement, generation: dict[str, int], capacity: int
) -> int:
    """Bytes that the KV cache may take, next to the weights that generate and all else there."""
    sources = ("server", "replica", "weights")
    weights = next((generation[name] for name in sources if name in generation), 0)
    share = _generation_share(config, where) * capacity - weights
    return max(0, min(int(share), capacity - sum(generation.values())))


def _generation_share(config: RunConfig, where: Placement) -> float:
    """Share of a device that weights and cache may take: only pages on a GPU are bounded."""
    rollout = config.actor_rollout_ref.rollout
    is_paged = where.device == "cuda" and rollout.name != "hf"
    return rollout.gpu_memory_utilization if is_paged else 1.0


def _largest(
    name: str, persistent: dict[str, int], moments: tuple[dict[str, int], ...]
) -> PhaseMemory:
    """A phase by the moment that needs most."""
    nothing: dict[str, int] = {}
    moment = max(moments, key=lambda parts: sum(parts.values()), default=nothing)
    parts = {**persistent, **moment}
    return PhaseMemory(name=name, parts={part: size for part, size in parts.items() if size})


def _compute_width(config: RunConfig, device: str) -> int:
    dtype = config.actor_rollout_ref.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return 2 if dtype == "bfloat16" else _FP32


def _kv_demand(
    config: RunConfig, shape: ModelShape, batch: BatchPlan, where: Placement, width: int
) -> int:
    """Prompts of a group are held once; each running sample holds its own response."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    running = min(rollout.max_num_seqs, ceil(batch.rollouts / where.replicas))
    if rollout.name == "hf":
        # One prompt at a time, which transformers holds once for each of its samples.
        rows = min(rollout.max_num_seqs, rollout.n)
        return rows * batch.longest_sequence * shape.kv_bytes_per_token(width)
    prompts = ceil(running / rollout.n)
    tokens = running * data.max_response_length + prompts * data.max_prompt_length
    if where.device == "cuda":
        # Whole pages: those that a prompt fills are shared, and a row may need one more to copy.
        shared = data.max_prompt_length // _PAGE
        own = ceil(batch.longest_sequence / _PAGE) - shared + 1
        tokens = (prompts * shared + running * own) * _PAGE
    # Ranks that share a copy have the keys of their own query heads.
    heads = ceil(shape.kv_heads / ranks_per_replica(config))
    return tokens * replace(shape, kv_heads=heads).kv_bytes_per_token(width)


def _generate(
    config: RunConfig, shape: ModelShape, batch: BatchPlan, largest: PassMemory
) -> tuple[dict[str, int], ...]:
    """Prefill of the prompts, then sampling of tokens."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    is_hf = rollout.name == "hf"
    rows = min(rollout.max_num_seqs, rollout.n if is_hf else batch.rollouts)
    read = (rows if is_hf else ceil(rows / rollout.n)) * data.max_prompt_length
    read = min(rollout.max_num_batched_tokens, read)
    tokens = PassTokens(packed=read, padded=read, computed=read, scored=0)
    # A chosen part of the vocabulary is found by sorting fp32 logits; plain sampling is one kernel.
    is_sorted = rollout.top_k > 0 or rollout.top_p < 1.0 or rollout.min_p > 0
    is_sorted = is_sorted or rollout.min_new_tokens > 0
    number = largest.width if largest.device == "cuda" and not is_sorted else 3 * _FP32
    generation = rows * (shape.vocab * number + 2 * shape.hidden * largest.width)
    return {"activations": replace(largest, tokens=tokens).inside()}, {"logits": generation}


def _score(keeps: StaticMemory, largest: PassMemory) -> tuple[dict[str, int], ...]:
    """Hidden states are made, then log-probabilities."""
    return (
        {"gathered": keeps.gathered, "activations": largest.inside()},
        {"gathered": keeps.gathered, "logits": largest.head(is_learning=False)},
    )


def _update(
    config: RunConfig,
    shape: ModelShape,
    batch: BatchPlan,
    where: Placement,
    keeps: StaticMemory,
    largest: PassMemory,
) -> tuple[dict[str, int], ...]:
    """The head's gradient, the first layer's gradient, and the step of the optimizer."""
    gradients = trainable(config, shape) * _FP32 // keeps.share
    if is_offloaded(config, where):
        gradients = 0
    # In the first micro-batch gradients come into being as activations go.
    early = gradients if batch.micro_batches > 1 else 0
    is_whole = not config.actor_rollout_ref.model.lora_rank
    own = largest.shape
    waiting = own.vocab * own.hidden * largest.width if own.is_tied and is_whole else 0
    # A unit's gradient is whole until it is summed over ranks, in fp32.
    number = largest.width + _FP32 if keeps.gathered and is_whole else 0
    summed = {"gathered": keeps.gathered + own.layer_parameters() * number}
    root = {"gathered": own.embeddings() * (largest.width + number) if keeps.gathered else 0}
    kept = largest.forward_bytes()
    return (
        {
            **summed,
            "gradients": early,
            "activations": kept,
            "logits": largest.head(is_learning=True),
        },
        {**summed, "gradients": early, "activations": kept + largest.layer(), "embedding": waiting},
        {**root, "gradients": gradients, "embedding": 2 * waiting},
    )
