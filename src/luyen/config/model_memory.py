"""Bytes of weights, optimizer state and activations on one device, alone or sharded.

Closed forms of what the engine keeps and makes, tensor by tensor. A pass has several moments that
may be its largest: inside a layer, at the output head, at the start of the backward pass.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import final

from luyen.config.model_folder.config_json import ModelShape, read_shape
from luyen.config.optimizer_memory import (
    adapter_tensors,
    is_optimizer_offloaded,
    moment_bytes,
    offload_bytes,
    whole_tensors,
)
from luyen.config.plan import (
    BatchPlan,
    Placement,
    count_weight_versions,
    devices_of_a_copy,
    has_teacher,
    needs_reference,
    ranks_per_replica,
    starts_servers,
)
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.run import RunConfig

_FP32 = 4
_BLOCK_4BIT = 64
_CHUNK = {"cuda": 1 << 27, "cpu, fused": 1 << 23, "cpu": 1 << 24}
"""Logits that exist at once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PassTokens:
    """Tokens of a pass, at the longest sequences.

    Example:
        >>> PassTokens(packed=4096, padded=4096, computed=2304, scored=2048).computed
        2304
    """

    packed: int
    """Of all sequences."""
    padded: int
    """The same with every sequence as long as attention on a CPU makes it."""
    computed: int
    """The same with a prompt counted once for all sequences that begin with it."""
    scored: int
    """Of the answers."""

    @classmethod
    def of(cls, config: RunConfig, batch: BatchPlan) -> "PassTokens":
        """Those of a device in the largest micro-batch: whole groups where they fit."""
        data, samples = config.data, batch.samples_per_prompt
        most = max(1, batch.micro_batch_tokens // batch.longest_sequence)
        sequences = most // samples * samples if most >= samples else most
        prompts = ceil(sequences / samples) * data.max_prompt_length
        scored = sequences * data.max_response_length
        longest, ranks = batch.longest_sequence, batch.ranks_per_sequence
        return cls(
            packed=ceil(sequences * longest / ranks),
            padded=ceil(sequences * padded_length(longest) / ranks),
            computed=ceil((prompts + scored) / ranks),
            scored=ceil(scored / ranks),
        )


def padded_length(tokens: int) -> int:
    """Tokens of a sequence inside attention on a CPU with AVX512; with AVX2 it may be more.

    Example:
        >>> padded_length(40), padded_length(300)
        (64, 512)
    """
    step = 32 if tokens <= 256 else 256
    return -(-tokens // step) * step


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """What a pass of so many tokens takes on a kind of device.

    Example:
        >>> shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4,
        ...                    intermediate=16, vocab=10, is_tied=True)
        >>> tokens = PassTokens(packed=10, padded=32, computed=10, scored=5)
        >>> model = ModelConfig()
        >>> PassMemory(shape=shape, model=model, tokens=tokens, width=4, device="cpu").inside() > 0
        True
    """

    shape: ModelShape
    """Of the model."""
    model: ModelConfig
    """What saves memory."""
    tokens: PassTokens
    """Of the pass."""
    width: int
    """Bytes of a number."""
    device: str
    """cpu or cuda."""

    @property
    def slices(self) -> int:
        """Parts in which a feed-forward layer is computed."""
        tiled_mlp = self.model.tiled_mlp
        return tiled_mlp.num_shards if tiled_mlp.enabled else 1

    def inside(self) -> int:
        """Bytes alive inside one layer when nothing is kept for a backward pass."""
        shape, tokens = self.shape, self.tokens
        inner = ceil(3 * shape.active_intermediate / self.slices)
        # The stream and its norm on both sides of attention, and what attention gave.
        feed_forward = (5 * shape.hidden + inner) * tokens.computed
        wide, narrow = self._heads()
        attention = (3 * shape.hidden + 3 * wide + 3 * narrow) * tokens.computed
        attention += self._laid_out()
        return max(feed_forward, attention) * self.width

    def kept(self) -> int:
        """Bytes that one layer keeps for its backward pass."""
        shape, tokens = self.shape, self.tokens
        wide, narrow = self._heads()
        is_tiled = self.slices > 1
        if self.device != "cuda":
            numbers = 6 * shape.hidden + shape.attention_width()
            numbers += 0 if is_tiled else 4 * shape.active_intermediate
            return (numbers * tokens.computed + self._laid_out()) * self.width
        # Two residual streams and their norms, queries, the output of attention, and the gate.
        numbers = (4 * shape.hidden + 2 * wide) * tokens.computed
        numbers += 0 if is_tiled else 3 * shape.active_intermediate * tokens.computed
        if tokens.computed < tokens.packed:
            numbers += self._laid_out()
        else:
            # Values are a part of the joint projection, which stays whole.
            numbers += (wide + 3 * narrow) * tokens.computed
        sums = (shape.heads + 2) * tokens.computed * _FP32
        return numbers * self.width + sums

    def backward(self) -> int:
        """Bytes that the backward pass of one layer makes, what it reads apart."""
        shape, tokens = self.shape, self.tokens
        wide, narrow = self._heads()
        inner = 3 * shape.active_intermediate
        if self.slices > 1:
            # The slice is computed again before its gradient.
            inner = ceil(2 * inner / self.slices)
        feed_forward = (inner + 3 * shape.hidden) * tokens.computed * self.width
        # Gradients of queries in fp32 and rounded; those of keys for every query head.
        attention = (2 * wide * self.width + _FP32 * wide) * tokens.computed
        attention += 2 * (wide + narrow) * self.width * tokens.packed
        return max(feed_forward, attention)

    def forward_bytes(self) -> int:
        """Bytes on the device when the forward pass is over."""
        if self.is_offloaded:
            return 0
        stream = self.shape.hidden * self.tokens.computed * self.width
        is_checkpointed = self.model.enable_gradient_checkpointing
        return self.shape.layers * stream if is_checkpointed else self.shape.layers * self.kept()

    def layer(self) -> int:
        """Bytes of the layer whose backward pass runs, in addition to `forward_bytes`."""
        is_made_again = self.model.enable_gradient_checkpointing or self.is_offloaded
        return self.backward() + (self.kept() if is_made_again else 0)

    def head(self, *, is_learning: bool) -> int:
        """Bytes of the output head: hidden states, a chunk of logits and, learning, gradients."""
        shape, scored = self.shape, self.tokens.scored
        is_fused = self.device == "cpu" and self.model.use_fused_kernels
        logits = min(scored * shape.vocab, _CHUNK["cpu, fused" if is_fused else self.device])
        rows = scored * shape.hidden * self.width
        if self.device != "cuda":
            # Logits, their softmax and the gradient or the entropy of a chunk exist together.
            return rows + (3 if is_learning else 2) * logits * _FP32
        if not is_learning:
            return rows + logits * self.width
        trains_head = self.model.lora_rank == 0
        # The sum over chunks and the share of the newest one, in fp32.
        weight = 2 * shape.vocab * shape.hidden * _FP32 if trains_head else 0
        return 2 * rows + logits * self.width + weight

    @property
    def is_offloaded(self) -> bool:
        """Whether activations are kept in host memory between the passes."""
        return self.device == "cuda" and self.model.enable_activation_offload

    def _laid_out(self) -> int:
        """Numbers of attention for which a shared prompt counts in every sequence."""
        wide, narrow = self._heads()
        if self.device == "cuda":
            return 2 * narrow * self.tokens.packed
        return (2 * wide + 2 * narrow) * self.tokens.padded

    def _heads(self) -> tuple[int, int]:
        """Numbers of all query heads, and of all key heads."""
        shape = self.shape
        return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


# Weights and optimizer state on a device, whole or sharded, and what ranks gather in a pass.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Bytes of weights and optimizer on one device, by what they are for.

    Example:
        >>> parts = {"training": {"weights": 10}, "generation": {"replica": 4}}
        >>> StaticMemory(**parts, gathered=0, share=1).colocated()
        {'weights': 10, 'replica': 4}
    """

    training: dict[str, int]
    """On devices that train."""
    generation: dict[str, int]
    """On devices of the rollout engine; empty if it shares the actor's weights."""
    gathered: int
    """Whole weights that a pass over shards has at once."""
    share: int
    """Devices that hold one copy of what learns."""

    def colocated(self) -> dict[str, int]:
        """Both on one device."""
        return {**self.training, **self.generation}


def static_memory(
    config: RunConfig, shape: ModelShape, where: Placement, width: int
) -> StaticMemory:
    """What is held by a run whose passes compute with numbers of `width` bytes."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    # A single process trains and generates with the same tensors; Ray workers need their own.
    has_copies = where.runtime == "ray" and config.trainer.stage == "rl"
    ranks = ranks_per_replica(config)
    own = divided_shape(shape, ranks)
    generation = {"replica": _weight_bytes(config, own, width)} if has_copies else {}
    versions = count_weight_versions(config.trainer) - (1 if has_copies else 0)
    if config.trainer.max_staleness > 0 and config.trainer.stage == "rl" and versions:
        # Frozen weights of whole copies are shared; each divided copy has its own.
        kept = trainable(config, shape) * width if ranks == 1 else _weight_bytes(config, own, width)
        generation["versions"] = versions * kept
    if starts_servers(config):
        generation["server"] = _server_bytes(config, shape, width)
    if where.world_size == 1:
        training = _alone(config, shape, where, width)
        if is_optimizer_offloaded(fsdp, where.device, 1):
            training["optimizer"] = offload_bytes(trainable(config, shape))
        return StaticMemory(training=training, generation=generation, gathered=0, share=1)
    share = fsdp.fsdp_size if fsdp.fsdp_size > 0 else where.world_size
    training = _sharded(config, shape, where, width, share)
    if is_offloaded(config, where):
        training = dict.fromkeys(training, 0)
    layers = 2 if fsdp.reshard_after_forward else shape.layers
    part = divided_shape(shape, fsdp.tensor_parallel_size)
    gathered = (part.embeddings() + layers * part.layer_parameters()) * width
    if config.actor_rollout_ref.actor.strategy == "megatron":
        gathered = _computed_with(config, shape, where, width)
    return StaticMemory(training=training, generation=generation, gathered=gathered, share=share)


def _computed_with(config: RunConfig, shape: ModelShape, where: Placement, width: int) -> int:
    """Bytes of the weights that Megatron's passes read, in addition to the masters.

    Each rank has its part of every layer of every model; what learns has fp32 gradients too.
    """
    own = _megatron_weights(config, shape)
    total = own * (width + _FP32)
    if any(role.name == "critic" for role in where.roles) and where.critic_pool is None:
        total += own * (width + _FP32)
    if needs_reference(config) and where.reference_pool is None:
        total += own * width
    if has_teacher(config):
        total += _megatron_weights(config, _teacher(config, shape)) * width
    return total


def _megatron_weights(config: RunConfig, shape: ModelShape) -> int:
    """Weights that a rank's passes read; experts are divided further than layers are."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    own = divided_shape(shape, fsdp.tensor_parallel_size)
    experts = max(1, own.experts // fsdp.expert_parallel_size)
    return replace(own, experts=experts).parameters()


def divided_shape(shape: ModelShape, ranks: int) -> ModelShape:
    """What each of the ranks that divide layers computes with; every rank has all key heads whose
    number they do not divide. The experts of a mixture stay whole, and a rank has some of them.

    Example:
        >>> shape = ModelShape(layers=2, hidden=8, heads=4, kv_heads=1, head_dim=4,
        ...                    intermediate=16, vocab=10, is_tied=True)
        >>> own = divided_shape(shape, 2)
        >>> own.heads, own.kv_heads, own.intermediate, own.vocab
        (2, 1, 8, 5)
    """
    keys = shape.kv_heads if shape.kv_heads % ranks else shape.kv_heads // ranks
    is_mixture = shape.experts > 1
    return replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=keys,
        intermediate=shape.intermediate // (1 if is_mixture else ranks),
        experts=max(1, shape.experts // ranks),
        shared=shape.shared // ranks,
        vocab=shape.vocab // ranks,
    )


def pool_share(config: RunConfig, pool: tuple[int, int]) -> int:
    """Devices of a role's own pool over which one copy of its weights is sharded."""
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    ranks = pool[0] * pool[1]
    return size if 0 < size < ranks else ranks


def is_offloaded(config: RunConfig, where: Placement) -> bool:
    """Whether shards, gradients and optimizer are in host memory."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    both = fsdp.param_offload and fsdp.optimizer_offload
    return both and where.world_size > 1 and where.device == "cuda"


def trainable(config: RunConfig, shape: ModelShape) -> int:
    """Weights that learn."""
    model = config.actor_rollout_ref.model
    if model.lora_rank == 0:
        return shape.parameters()
    return shape.lora_parameters(model.lora_rank, has_norms=model.use_dora)


def _weight_bytes(config: RunConfig, shape: ModelShape, width: int) -> int:
    """Bytes of the policy's weights on one device, adapter included."""
    model = config.actor_rollout_ref.model
    adapter = trainable(config, shape) if model.lora_rank else 0
    # A DoRA layer makes its weight with the adapter, the adapter's and an identity, for the norms.
    largest = shape.hidden * max(shape.intermediate, shape.heads * shape.head_dim)
    if model.quantization == "none":
        made = shape.intermediate**2 + 3 * largest if model.lora_rank and model.use_dora else 0
        return (shape.parameters() + adapter + made) * width
    # Norms are no linear layers, and experts are stacked in one tensor, which stays as it is.
    norms = 2 * shape.hidden
    experts = 3 * shape.hidden * shape.intermediate * shape.experts if shape.experts > 1 else 0
    linear = shape.layers * (shape.layer_parameters() - norms - experts)
    # Half a byte and a scale for each block of 64: fp32, or 8 bits with fp32 for 256 of them.
    blocks = ceil(linear / _BLOCK_4BIT)
    scales = blocks + _FP32 * ceil(blocks / 256) if model.double_quantization else _FP32 * blocks
    rest = shape.parameters() - linear
    # Adapters of 4-bit weights are fp32; one weight at a time is restored for its product.
    return linear // 2 + scales + (rest + largest) * width + adapter * _FP32


def _server_bytes(config: RunConfig, shape: ModelShape, width: int) -> int:
    """Weights of the servers on one device: one server for each version that is in use at once."""
    arr, versions = config.actor_rollout_ref, count_weight_versions(config.trainer)
    sends_adapter = arr.model.lora_rank > 0 and arr.rollout.server.lora_format == "adapter"
    adapter = trainable(config, shape) if sends_adapter else 0
    return versions * (shape.parameters() + adapter) * width // devices_of_a_copy(config)


def _frozen_whole(config: RunConfig, shape: ModelShape) -> int:
    rank = config.actor_rollout_ref.model.lora_rank
    return shape.parameters() if rank else 0


def _moments(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the actor's moments."""
    model = config.actor_rollout_ref.model
    tensors = (
        adapter_tensors(shape, model.lora_rank, has_norms=model.use_dora)
        if model.lora_rank
        else whole_tensors(shape)
    )
    return moment_bytes(config.actor_rollout_ref.actor.optim, tensors)


def critic_bytes(config: RunConfig, shape: ModelShape, *, width: int, share: int) -> int:
    """Bytes of a critic and its optimizer on one of `share` devices.

    Passes of bf16 read rounded weights; masters are fp32, and shards of any type are masters.
    """
    weight = _FP32 + (width if share == 1 and width == 2 else 0)
    moments = moment_bytes(config.critic.optim, whole_tensors(shape))
    return (shape.parameters() * weight + moments) // share


def _alone(config: RunConfig, shape: ModelShape, where: Placement, width: int) -> dict[str, int]:
    # With bf16 the optimizer holds fp32 master weights in addition to its moments.
    is_quantized = config.actor_rollout_ref.model.quantization != "none"
    masters = trainable(config, shape) * _FP32 if width == 2 and not is_quantized else 0
    parts = {
        "weights": _weight_bytes(config, shape, width),
        "optimizer": masters + _moments(config, shape),
    }
    parts |= _frozen_models(config, shape, where, width=width, share=1)
    if config.trainer.async_save and where.device == "cpu":
        # On a GPU the copy is in host memory, which is not planned here.
        learned = trainable(config, shape) * width + parts["optimizer"]
        parts["checkpoint"] = learned + parts.get("critic", 0)
    return parts


def _sharded(
    config: RunConfig, shape: ModelShape, where: Placement, width: int, share: int
) -> dict[str, int]:
    """Shards of what learns are fp32, whatever passes compute with; what is frozen keeps its type.

    The two moments come on top.
    """
    learning = trainable(config, shape)
    frozen = _frozen_whole(config, shape)
    parts = {
        "weights": (learning * _FP32 + frozen * width) // share,
        "optimizer": _moments(config, shape) // share,
    }
    parts |= _frozen_models(config, shape, where, width=width, share=share)
    if config.trainer.async_save and where.device == "cpu":
        parts["checkpoint"] = learning * 3 * _FP32 // share + parts.get("critic", 0)
    return parts


def _frozen_models(
    config: RunConfig,
    shape: ModelShape,
    where: Placement,
    *,
    width: int,
    share: int,
) -> dict[str, int]:
    """Reference, critic and teacher; those that do not learn have `width` bytes a weight."""
    parts: dict[str, int] = {}
    is_lora = config.actor_rollout_ref.model.lora_rank > 0
    if needs_reference(config) and not is_lora and where.reference_pool is None:
        parts["reference"] = shape.parameters() * width // share
    if any(role.name == "critic" for role in where.roles) and where.critic_pool is None:
        fsdp = config.actor_rollout_ref.actor.fsdp_config
        is_moved = is_optimizer_offloaded(fsdp, where.device, share)
        kept = shape.parameters() * width
        parts["critic"] = (
            kept if is_moved else critic_bytes(config, shape, width=width, share=share)
        )
    if has_teacher(config):
        parts["teacher"] = _teacher(config, shape).parameters() * width // share
    return parts


def _teacher(config: RunConfig, student: ModelShape) -> ModelShape:
    """The teacher's own shape; the student's where no config on this machine says it."""
    path = config.distill.teacher_path
    return (read_shape(ModelConfig(path=path)) if path is not None else None) or student
