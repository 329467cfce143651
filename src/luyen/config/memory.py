"""Memory of each phase of a step on one device, from the model's shape and the batch plan.

Closed-form estimates. Weights, gradients and optimizer state are exact for the layouts the training
engine uses; activations count the tensors a decoder layer keeps for its backward pass.
"""

from dataclasses import dataclass
from math import ceil
from typing import final

from luyen.config.machine import Machine
from luyen.config.model_shape import ModelShape
from luyen.config.plan import BatchPlan, Placement, needs_reference
from luyen.config.schema.run import RunConfig

_FP32 = 4
_LOGIT_CHUNK = 1024
"""Tokens whose logits exist at once in the chunked head."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Bytes of one phase on one device, by what they are for.

    Example:
        >>> Phase(name="update", parts={"weights": 10, "gradients": 20}).total
        30
    """

    name: str
    """generate, log-probs or update."""
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
        >>> MemoryPlan(phases=(Phase(name="update", parts={"weights": 3}),), device_bytes=2,
        ...            kv_budget=0, kv_demand=0).fits
        False
    """

    phases: tuple[Phase, ...]
    """In the order of a step."""
    device_bytes: int
    """Memory of one device."""
    kv_budget: int
    """Bytes the KV cache may take."""
    kv_demand: int
    """Bytes the KV cache would take if every sequence that may run were of full length."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether the peak stays below the device's memory."""
        return self.peak.total <= self.device_bytes


def plan_memory(
    config: RunConfig, shape: ModelShape, batch: BatchPlan, where: Placement, machine: Machine
) -> MemoryPlan:
    """Bytes of each phase on one device."""
    width = _compute_width(config, where.device)
    resident = _resident(config, shape, where, width)
    capacity = machine.device_bytes(where.device)
    demand = _kv_demand(config, shape, batch, where, width)
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    budget = max(0, int(capacity * share) - resident["weights"])
    logits = min(batch.micro_batch_tokens, _LOGIT_CHUNK) * shape.vocab * _FP32
    forward = _layer_bytes(shape, width) * batch.micro_batch_tokens
    phases = (
        Phase(
            name="generate", parts={**resident, "kv cache": min(demand, budget), "logits": logits}
        ),
        Phase(name="log-probs", parts={**resident, "activations": forward, "logits": logits}),
        Phase(
            name="update", parts={**resident, **_update(config, shape, batch, where, width, logits)}
        ),
    )
    return MemoryPlan(phases=phases, device_bytes=capacity, kv_budget=budget, kv_demand=demand)


def _compute_width(config: RunConfig, device: str) -> int:
    dtype = config.actor_rollout_ref.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return 2 if dtype == "bfloat16" else _FP32


def _trainable(config: RunConfig, shape: ModelShape) -> int:
    rank = config.actor_rollout_ref.model.lora_rank
    return shape.lora_parameters(rank) if rank else shape.parameters()


def _resident(config: RunConfig, shape: ModelShape, where: Placement, width: int) -> dict[str, int]:
    """What stays on the device during the whole step."""
    model = config.actor_rollout_ref.model
    share = where.world_size
    # With bf16 the optimizer holds fp32 masters beside its two moments.
    moments = (3 if width == 2 else 2) * _FP32
    adapter = shape.lora_parameters(model.lora_rank) if model.lora_rank else 0
    parts = {
        "weights": (shape.parameters() + adapter) * width,
        "optimizer": _trainable(config, shape) * moments // share,
    }
    if needs_reference(config) and not model.lora_rank:
        parts["reference"] = shape.parameters() * width // share
    if any(role.name == "critic" for role in where.roles):
        parts["critic"] = shape.parameters() * (width + moments) // share
    return parts


def _kv_demand(
    config: RunConfig, shape: ModelShape, batch: BatchPlan, where: Placement, width: int
) -> int:
    """Prompts of a group are held once; each running sample holds its own response."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    running = min(rollout.max_num_seqs, ceil(batch.rollouts / where.world_size))
    prompts = ceil(running / rollout.n)
    tokens = running * data.max_response_length + prompts * data.max_prompt_length
    return tokens * shape.kv_bytes_per_token(width)


def _layer_bytes(shape: ModelShape, width: int) -> int:
    """Bytes a token needs inside one decoder layer while it is computed."""
    wide = shape.heads * shape.head_dim
    numbers = 6 * shape.hidden + 2 * shape.attention_width() + wide + 4 * shape.intermediate
    return numbers * width


def _update(
    config: RunConfig,
    shape: ModelShape,
    batch: BatchPlan,
    where: Placement,
    width: int,
    logits: int,
) -> dict[str, int]:
    gradients = _trainable(config, shape) * _FP32 // where.world_size
    layer = _layer_bytes(shape, width)
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        per_token = layer + shape.layers * shape.hidden * width
    else:
        per_token = layer * shape.layers
    return {
        "gradients": gradients,
        "activations": per_token * batch.micro_batch_tokens,
        # Logits, their softmax and the gradient of a chunk exist together.
        "logits": 3 * logits,
    }
