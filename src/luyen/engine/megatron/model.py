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
from torch.utils.checkpoint import checkpoint

from luyen.engine.megatron.experts import RoutedExperts
from luyen.engine.megatron.fused_weights import (
    AttentionHeads,
    FusedWeight,
    join_gate,
    split_gate,
)
from luyen.engine.tensor_parallel import TensorRanks
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
        is_qwen2, is_qwen3 = config.model_type == "qwen2", config.model_type.startswith("qwen3")
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
            add_qkv_bias=is_qwen2,
            qk_layernorm=is_qwen3,
            params_dtype=self.dtype,
            **_COMMON,
        )
        plain: Any = local_spec(qk_layernorm=is_qwen3, normalization="RMSNorm")
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
        found = [_plain(gpt.embedding.word_embeddings.weight, hf.embed_tokens, at=0)]
        for theirs, ours in zip(gpt.decoder.layers, hf.layers, strict=True):
            found += _layer_weights(theirs, ours, own)
        found.append(_plain(gpt.decoder.final_layernorm.weight, hf.norm))
        # A tied one is made with the embedding; a critic reads none.
        has_own = not gpt.share_embeddings_and_output_weights
        found.append(_plain(self._output if has_own else None, policy.head.linear, at=0))
        return found


def _forward_with_log(layer: Any, plain: Callable[..., Any], **given: Any) -> Any:
    """A layer's forward pass, whose router knows the log; also where it is computed again."""
    layer.mlp.log = given["attention_mask"].routing
    return plain(**given)


def _layer_weights(theirs: Any, ours: Any, heads: AttentionHeads) -> list[FusedWeight]:
    attention = theirs.self_attention
    names = ("q_proj", "k_proj", "v_proj")
    reads = [ours.self_attn.get_submodule(name) for name in names]
    is_routed = isinstance(theirs.mlp, RoutedExperts)
    found = [
        _plain(theirs.input_layernorm.weight, ours.input_layernorm),
        *(
            FusedWeight(
                weight=attention.linear_qkv.get_parameter(part),
                sources=tuple((linear, part) for linear in reads),
                at=0,
                join=heads.join,
                split=heads.split,
            )
            for part, _ in reads[0].named_parameters(recurse=False)
        ),
        _plain(attention.linear_proj.weight, ours.self_attn.o_proj, at=1),
        _plain(theirs.pre_mlp_layernorm.weight, ours.post_attention_layernorm),
        *(_expert_weights if is_routed else _mlp_weights)(theirs.mlp, ours.mlp),
    ]
    for theirs_name, name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
        norm = dict(ours.self_attn.named_children()).get(name)
        if norm is not None:
            weight = attention.get_submodule(theirs_name).weight
            found.append(_plain(weight, norm, is_partial=True))
    return found


def _mlp_weights(theirs: Any, ours: Any) -> list[FusedWeight]:
    first = FusedWeight(
        weight=theirs.linear_fc1.weight,
        sources=((ours.gate_proj, "weight"), (ours.up_proj, "weight")),
        at=0,
        join=join_gate,
        split=split_gate,
    )
    return [first, _plain(theirs.linear_fc2.weight, ours.down_proj, at=1)]


def _expert_weights(theirs: Any, ours: Any) -> list[FusedWeight]:
    """Stacked experts are divided whole, so that they are the same in both."""
    stacked = {"gate_up_proj": theirs.gate_up, "down_proj": theirs.down}
    experts = [
        FusedWeight(weight=weight, sources=((ours.experts, name),), at=0, is_spread=True)
        for name, weight in stacked.items()
    ]
    return [_plain(theirs.router, ours.gate), *experts]


def _plain(
    weight: Any, module: nn.Module, *, at: int | None = None, is_partial: bool = False
) -> FusedWeight:
    return FusedWeight(weight=weight, sources=((module, "weight"),), at=at, is_partial=is_partial)


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
