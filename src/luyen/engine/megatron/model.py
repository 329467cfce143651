"""Megatron's model for a Hugging Face configuration: its layers, with our attention in them.

Megatron's own attention without Transformer Engine knows no packed sequences. Ours takes its place
in the layer specification, and rotary embeddings get the position of every packed token. So do our
routed layers (`luyen.engine.megatron.experts`) in mixtures of experts.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from luyen.engine.fsdp import join_ranks, limit_waiting
from luyen.engine.megatron.experts import RoutedExperts
from luyen.engine.megatron.fused_weights import (
    AttentionHeads,
    FusedWeight,
    layer_weights,
    plain_weight,
)
from luyen.engine.tensor_parallel import TENSOR, TensorRanks
from luyen.models.attention import AttentionContext, AttentionWindow
from luyen.models.experts import RoutingLog, routed_layers
from luyen.models.policy import Policy


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """What layers know of a pass; it travels in the place of Megatron's attention mask.

    Example:
        >>> sorted(_Call.__slots__)
        ['context', 'routing']
    """

    context: AttentionContext
    """Which tokens see each other."""
    routing: RoutingLog | None
    """What routers write to."""


@final
class _PackedAttention(nn.Module):
    """Attention over packed tokens, as the context of the pass says."""

    def __init__(self, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: _Call, **_: Any) -> Tensor:
        """`[tok, 1, heads, width]` in, `[tok, 1, heads x width]` out."""
        q, k, v = (x[:, 0].transpose(0, 1)[None] for x in (query, key, value))
        scale = query.shape[-1] ** -0.5
        made = call.context.attend(self.layer, q, k, v, scale, AttentionWindow())
        return made[0].flatten(1)[:, None]


_COMMON: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Weights are filled from those of Hugging Face, on any device.
    "use_cpu_initialization": True,
    "perform_initialization": False,
    # Kernels of Apex, and functions that it compiles.
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
"""What its configuration is for every model."""


@final
class MegatronLayers:
    """Megatron's model of a policy on this rank; not a module, so that a policy does not own it."""

    def __init__(
        self, policy: Policy, ranks: TensorRanks, spread: dist.ProcessGroup, *, has_head: bool
    ) -> None:
        """Its weights are still to be filled; `has_head`: the output layer is read.

        `ranks` divide layers, and ranks of the group `spread` further divide experts.
        """
        self._ranks = ranks
        self._config: Any = policy.model.config.get_text_config()
        self._hf: Any = policy.model.base_model
        embedding: Any = policy.model.get_input_embeddings()
        self._padding: int | None = embedding.padding_idx
        self.dtype: torch.dtype = embedding.weight.dtype
        self.is_tied = _is_tied(policy)
        self._routed = {block: i for i, block in enumerate(routed_layers(policy.model))}
        self.gpt = self._build(has_head=has_head and not self.is_tied)
        self._route(spread)
        self.gpt.to(policy.device)
        self.gpt.requires_grad_(embedding.weight.requires_grad)
        if policy.model.is_gradient_checkpointing:
            for layer in self.gpt.decoder.layers:
                vars(layer)["forward"] = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )

    def _build(self, *, has_head: bool) -> Any:
        config = self._config
        attention = self._hf.layers[0].self_attn
        has_norms = "q_norm" in dict(attention.named_children())
        gpt_model, local_spec, block, configuration = _builders()
        own = configuration(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=self.width,
            ffn_hidden_size=config.intermediate_size,
            tensor_model_parallel_size=self._ranks.size,
            layernorm_epsilon=config.rms_norm_eps,
            add_qkv_bias=attention.q_proj.bias is not None,
            qk_layernorm=has_norms,
            params_dtype=self.dtype,
            **_COMMON,
        )
        plain: Any = local_spec(qk_layernorm=has_norms, normalization="RMSNorm")
        plain.submodules.self_attention.submodules.core_attention = _PackedAttention
        routed = copy.deepcopy(plain)
        routed.submodules.mlp = nn.Identity  # `_route` replaces it
        layers = [routed if layer.mlp in self._routed else plain for layer in self._hf.layers]
        made = gpt_model(
            own,
            block(layer_specs=layers, layer_norm=plain.submodules.input_layernorm),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            post_process=True,
            position_embedding_type="none",
            share_embeddings_and_output_weights=not has_head,
        )
        return made.to(self.dtype)

    def _route(self, spread: dist.ProcessGroup) -> None:
        """Give layers of a mixture their router and experts."""
        for layer, ours in zip(self.gpt.decoder.layers, self._hf.layers, strict=True):
            if ours.mlp in self._routed:
                number = self._routed[ours.mlp]
                layer.mlp = RoutedExperts(ours.mlp, number, self._ranks, spread).to(self.dtype)
                vars(layer)["forward"] = partial(_forward_with_log, layer, layer.forward)

    @property
    def width(self) -> int:
        """Width of a head."""
        return self._hf.layers[0].self_attn.head_dim

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer."""
        return self.gpt.shared_embedding_or_output_weight() if self.is_tied else self._output

    @property
    def _output(self) -> Tensor:
        return self.gpt.output_layer.weight

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: AttentionContext,
        routing: RoutingLog | None = None,
    ) -> Tensor:
        """Last hidden states `[tok, hidden]` of packed tokens; routers write the log."""
        hidden = self.gpt.embedding(tokens[None], positions[None])
        if self._padding is not None:  # its row learns as an output, not as an input
            is_padding = (tokens == self._padding)[:, None, None]
            hidden = torch.where(is_padding, hidden.detach(), hidden)
        angles = positions[:, None].float() * self._hf.rotary_emb.inv_freq.float()
        turned = torch.cat([angles, angles], -1)[:, None, None]
        call = _Call(context=context, routing=routing)
        made = self.gpt.decoder(hidden_states=hidden, attention_mask=call, rotary_pos_emb=turned)
        return made[:, 0]

    def weights(self, policy: Policy) -> list[FusedWeight]:
        """Every weight of the model, and the parameters of the policy that it is made of."""
        gpt, hf = self.gpt, self._hf
        heads, groups = self._config.num_attention_heads, self._config.num_key_value_heads
        own = AttentionHeads(
            groups=groups // self._ranks.size, queries=heads // groups, width=self.width
        )
        found = [plain_weight(gpt.embedding.word_embeddings.weight, hf.embed_tokens, at=0)]
        for theirs, ours in zip(gpt.decoder.layers, hf.layers, strict=True):
            found += layer_weights(theirs, ours, own)
        found.append(plain_weight(gpt.decoder.final_layernorm.weight, hf.norm))
        # A tied one is made with the embedding; a critic reads none.
        has_own = not gpt.share_embeddings_and_output_weights
        found.append(plain_weight(self._output if has_own else None, policy.head.linear, at=0))
        return found


def _forward_with_log(layer: Any, plain: Callable[..., Any], **given: Any) -> Any:
    """A layer's forward pass, whose router knows the log; also where it is computed again."""
    layer.mlp.log = given["attention_mask"].routing
    return plain(**given)


def _is_tied(policy: Policy) -> bool:
    embedding: Any = policy.model.get_input_embeddings()
    output: Any = policy.head.linear
    return output.weight is embedding.weight


def _builders() -> tuple[Any, Any, Any, Any]:
    """What makes a model, specifications of a layer and of all layers, and its configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reports every optional library that is not there
        from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
        from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
            get_gpt_layer_local_spec,
        )
        from megatron.core.transformer.transformer_block import (  # pyright: ignore[reportMissingImports]
            TransformerBlockSubmodules,
        )
        from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
            TransformerConfig,
        )
    return GPTModel, get_gpt_layer_local_spec, TransformerBlockSubmodules, TransformerConfig


# Ranks: which divide layers, and which divide experts.

SHARD = "shard"
"""Dimension of the mesh whose ranks compute different sequences, and share masters."""
_EXPERTS, _COPIES = "experts", "copies"
"""Dimensions of the second mesh: `SHARD` in two parts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MegatronRanks:
    """Groups that this rank belongs to.

    Ranks with different sequences that have the same experts are consecutive among all of those, so
    that their masters together are the experts that they compute with.

    Example:
        >>> sorted(MegatronRanks.__slots__)
        ['copies', 'mesh', 'spread']
    """

    mesh: DeviceMesh
    """Ranks that divide layers, and ranks that compute different sequences."""
    spread: dist.ProcessGroup
    """Ranks with different sequences, each of which has some of the experts."""
    copies: dist.ProcessGroup
    """Ranks with different sequences that have the same experts."""

    @property
    def dividing(self) -> dist.ProcessGroup:
        """Ranks that divide layers."""
        return self.mesh.get_group(TENSOR)

    @property
    def sharing(self) -> dist.ProcessGroup:
        """Ranks that compute different sequences."""
        return self.mesh.get_group(SHARD)


def join_megatron_ranks(
    rank: int,
    world: int,
    address: str,
    *,
    device: str,
    tensor_size: int,
    expert_size: int,
    timeout_s: float,
) -> MegatronRanks:
    """Join the process group; `tensor_size` consecutive ranks divide each layer.

    The remaining ranks are `expert_size` groups, each of which has some of the experts.
    """
    join_ranks(rank, world, address, device=device, timeout_s=timeout_s)
    _divide_ranks(tensor_size, timeout_s)
    places = torch.arange(world).view(-1, tensor_size).t().contiguous()
    mesh = DeviceMesh(device, places, mesh_dim_names=(TENSOR, SHARD))
    parts = places.view(tensor_size, expert_size, -1)
    experts = DeviceMesh(device, parts, mesh_dim_names=(TENSOR, _EXPERTS, _COPIES))
    for one in (mesh, experts):
        limit_waiting(one, timeout_s)
    spread, copies = experts.get_group(_EXPERTS), experts.get_group(_COPIES)
    return MegatronRanks(mesh=mesh, spread=spread, copies=copies)


def _divide_ranks(tensor_size: int, timeout_s: float) -> None:
    """Tell Megatron which ranks of the process group divide layers: consecutive ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    # It reports its own deprecated calls in each pass.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    parallel_state.destroy_model_parallel()  # that of a process group that is gone
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
