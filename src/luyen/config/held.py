"""What stays on a device during a whole step, alone or sharded, and what ranks gather in a pass."""

from dataclasses import dataclass
from typing import final

from luyen.config.model_shape import ModelShape, read_shape
from luyen.config.plan import Placement, needs_reference, versions_held
from luyen.config.schema.model import Model
from luyen.config.schema.run import RunConfig
from luyen.config.signals import has_teacher

_FP32 = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of weights and optimizer on one device, by what they are for.

    Example:
        >>> Held(training={"weights": 10}, drawing={"replica": 4}, gathered=0, share=1).beside()
        {'weights': 10, 'replica': 4}
    """

    training: dict[str, int]
    """Where the policy learns."""
    drawing: dict[str, int]
    """Where a copy of the rollout engine draws; nothing where it has the actor's own weights."""
    gathered: int
    """Whole weights that a pass over shards has at once."""
    share: int
    """Devices that hold one copy of what learns."""

    def beside(self) -> dict[str, int]:
        """Both on one device."""
        return {**self.training, **self.drawing}


def held(config: RunConfig, shape: ModelShape, where: Placement, width: int) -> Held:
    """What is held by a run whose passes compute with numbers of `width` bytes."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    # One process trains and draws with the same tensors; other processes need their own.
    has_copies = where.runtime == "ray" and config.trainer.stage == "rl"
    drawing = {"replica": _whole(config, shape) * width} if has_copies else {}
    others = versions_held(config.trainer) - (1 if has_copies else 0)
    if config.trainer.max_staleness > 0 and config.trainer.stage == "rl" and others:
        drawing["versions"] = others * trainable(config, shape) * width
    if where.world_size == 1:
        training = _alone(config, shape, where, width)
        return Held(training=training, drawing=drawing, gathered=0, share=1)
    share = fsdp.fsdp_size if fsdp.fsdp_size > 0 else where.world_size
    training = _sharded(config, shape, where, width, share)
    if is_offloaded(config, where):
        training = dict.fromkeys(training, 0)
    layers = 2 if fsdp.reshard_after_forward else shape.layers
    gathered = (shape.embeddings() + layers * shape.layer_parameters()) * width
    return Held(training=training, drawing=drawing, gathered=gathered, share=share)


def is_offloaded(config: RunConfig, where: Placement) -> bool:
    """Whether shards, gradients and optimizer lie in main memory, away from the device."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    both = fsdp.param_offload and fsdp.optimizer_offload
    return both and where.world_size > 1 and where.device == "cuda"


def trainable(config: RunConfig, shape: ModelShape) -> int:
    """Weights that learn."""
    rank = config.actor_rollout_ref.model.lora_rank
    return shape.lora_parameters(rank) if rank else shape.parameters()


def _whole(config: RunConfig, shape: ModelShape) -> int:
    rank = config.actor_rollout_ref.model.lora_rank
    return shape.parameters() + (shape.lora_parameters(rank) if rank else 0)


def _alone(config: RunConfig, shape: ModelShape, where: Placement, width: int) -> dict[str, int]:
    # With bf16 the optimizer holds fp32 masters beside its two moments.
    moments = (3 if width == 2 else 2) * _FP32
    parts = {
        "weights": _whole(config, shape) * width,
        "optimizer": trainable(config, shape) * moments,
    }
    parts |= _others(config, shape, where, frozen=width, learning=width + moments, share=1)
    if config.trainer.async_save and where.device == "cpu":
        # On a GPU the copy lies in main memory, which is not planned here.
        learned = trainable(config, shape) * width + parts["optimizer"]
        parts["checkpoint"] = learned + parts.get("critic", 0)
    return parts


def _sharded(
    config: RunConfig, shape: ModelShape, where: Placement, width: int, share: int
) -> dict[str, int]:
    """Shards of what learns are fp32, whatever passes compute with; what is frozen keeps its type.

    Beside them are the two moments.
    """
    learning = trainable(config, shape)
    frozen = _whole(config, shape) - learning
    parts = {
        "weights": (learning * _FP32 + frozen * width) // share,
        "optimizer": learning * 2 * _FP32 // share,
    }
    parts |= _others(config, shape, where, frozen=width, learning=3 * _FP32, share=share)
    if config.trainer.async_save and where.device == "cpu":
        parts["checkpoint"] = learning * 3 * _FP32 // share + parts.get("critic", 0)
    return parts


def _others(
    config: RunConfig,
    shape: ModelShape,
    where: Placement,
    *,
    frozen: int,
    learning: int,
    share: int,
) -> dict[str, int]:
    """Reference, critic and teacher, at so many bytes a weight."""
    parts: dict[str, int] = {}
    if needs_reference(config) and not config.actor_rollout_ref.model.lora_rank:
        parts["reference"] = shape.parameters() * frozen // share
    if any(role.name == "critic" for role in where.roles):
        parts["critic"] = shape.parameters() * learning // share
    if has_teacher(config):
        parts["teacher"] = _teacher(config, shape).parameters() * frozen // share
    return parts


def _teacher(config: RunConfig, student: ModelShape) -> ModelShape:
    """The teacher's own shape; the student's where no config on this machine says it."""
    path = config.distill.teacher_path
    return (read_shape(Model(path=path)) if path is not None else None) or student
