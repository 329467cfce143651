"""Megatron's model for a Hugging Face configuration: its layers, with our attention in them.

Megatron's own attention without Transformer Engine knows no packed sequences. Ours takes its place
in the layer specification, and rotary embeddings get the position of every packed token.
"""

import warnings
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from luyen.engine.fsdp import join_ranks, limit_waiting
from luyen.engine.megatron.fused_weights import (
    AttentionHeads,
    FusedWeight,
    join_gate,
    split_gate,
)
from luyen.engine.tensor_parallel import TENSOR
from luyen.models.attention import AttentionContext, AttentionWindow
from luyen.models.policy import Policy


@final
class _PackedAttention(nn.Module):
    """Attention over packed tokens, as the context of the pass says."""

    def __init__(self, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, **_: Any
    ) -> Tensor:
        """`[tok, 1, heads, width]` in, `[tok, 1, heads x width]` out."""
        q, k, v = (x[:, 0].transpose(0, 1)[None] for x in (query, key, value))
        scale = query.shape[-1] ** -0.5
        made = context.attend(self.layer, q, k, v, scale, AttentionWindow())
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

    def __init__(self, policy: Policy, tensor_size: int, *, has_head: bool) -> None:
        """Its weights are still to be filled; `has_head`: the output layer is read."""
        self._config: Any = policy.model.config.get_text_config()
        self._hf: Any = policy.model.base_model
        embedding: Any = policy.model.get_input_embeddings()
        self._padding: int | None = embedding.padding_idx
        self.dtype: torch.dtype = embedding.weight.dtype
        self.is_tied = _is_tied(policy)
        self.gpt = self._build(tensor_size, has_head=has_head and not self.is_tied)
        self.gpt.to(policy.device)
        self.gpt.requires_grad_(embedding.weight.requires_grad)
        if policy.model.is_gradient_checkpointing:
            for layer in self.gpt.decoder.layers:
                vars(layer)["forward"] = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )

    def _build(self, tensor_size: int, *, has_head: bool) -> Any:
        config = self._config
        is_qwen2, is_qwen3 = (config.model_type == name for name in ("qwen2", "qwen3"))
        gpt_model, local_spec, configuration = _builders()
        own = configuration(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=self.width,
            ffn_hidden_size=config.intermediate_size,
            tensor_model_parallel_size=tensor_size,
            layernorm_epsilon=config.rms_norm_eps,
            add_qkv_bias=is_qwen2,
            qk_layernorm=is_qwen3,
            params_dtype=self.dtype,
            **_COMMON,
        )
        spec: Any = local_spec(qk_layernorm=is_qwen3, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = _PackedAttention
        made = gpt_model(
            own,
            spec,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            post_process=True,
            position_embedding_type="none",
            share_embeddings_and_output_weights=not has_head,
        )
        return made.to(self.dtype)

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

    def read(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states `[tok, hidden]` of packed tokens."""
        hidden = self.gpt.embedding(tokens[None], positions[None])
        if self._padding is not None:  # its row learns as an output, not as an input
            is_padding = (tokens == self._padding)[:, None, None]
            hidden = torch.where(is_padding, hidden.detach(), hidden)
        angles = positions[:, None].float() * self._hf.rotary_emb.inv_freq.float()
        turned = torch.cat([angles, angles], -1)[:, None, None]
        made = self.gpt.decoder(hidden_states=hidden, attention_mask=context, rotary_pos_emb=turned)
        return made[:, 0]

    def weights(self, policy: Policy, tensor_size: int) -> list[FusedWeight]:
        """Every weight of the model, and the parameters of the policy that it is made of."""
        gpt, hf = self.gpt, self._hf
        heads, groups = self._config.num_attention_heads, self._config.num_key_value_heads
        own = AttentionHeads(
            groups=groups // tensor_size, queries=heads // groups, width=self.width
        )
        found = [_plain(gpt.embedding.word_embeddings.weight, hf.embed_tokens, at=0)]
        for theirs, ours in zip(gpt.decoder.layers, hf.layers, strict=True):
            found += _layer_weights(theirs, ours, own)
        found.append(_plain(gpt.decoder.final_layernorm.weight, hf.norm))
        # A tied one is made with the embedding; a critic reads none.
        has_own = not gpt.share_embeddings_and_output_weights
        found.append(_plain(self._output if has_own else None, policy.head.linear, at=0))
        return found


def _layer_weights(theirs: Any, ours: Any, heads: AttentionHeads) -> list[FusedWeight]:
    attention, mlp = theirs.self_attention, theirs.mlp
    names = ("q_proj", "k_proj", "v_proj")
    reads = [ours.self_attn.get_submodule(name) for name in names]
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
        FusedWeight(
            weight=mlp.linear_fc1.weight,
            sources=((ours.mlp.gate_proj, "weight"), (ours.mlp.up_proj, "weight")),
            at=0,
            join=join_gate,
            split=split_gate,
        ),
        _plain(mlp.linear_fc2.weight, ours.mlp.down_proj, at=1),
    ]
    for theirs_name, name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
        norm = dict(ours.self_attn.named_children()).get(name)
        if norm is not None:
            weight = attention.get_submodule(theirs_name).weight
            found.append(_plain(weight, norm, is_partial=True))
    return found


def _plain(
    weight: Any, module: nn.Module, *, at: int | None = None, is_partial: bool = False
) -> FusedWeight:
    return FusedWeight(weight=weight, sources=((module, "weight"),), at=at, is_partial=is_partial)


def _is_tied(policy: Policy) -> bool:
    embedding: Any = policy.model.get_input_embeddings()
    output: Any = policy.head.linear
    return output.weight is embedding.weight


def _builders() -> tuple[Any, Any, Any]:
    """What makes a model, its layer specification and its configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reports every optional library that is not there
        from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
        from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
            get_gpt_layer_local_spec,
        )
        from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
            TransformerConfig,
        )
    return GPTModel, get_gpt_layer_local_spec, TransformerConfig


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


SHARD = "shard"
"""Dimension of the mesh whose ranks compute different sequences, and share masters."""


def join_megatron_ranks(
    rank: int, world: int, address: str, *, device: str, tensor_size: int, timeout_s: float
) -> DeviceMesh:
    """Join the process group; `tensor_size` consecutive ranks divide each layer."""
    join_ranks(rank, world, address, device=device, timeout_s=timeout_s)
    _divide_ranks(tensor_size, timeout_s)
    places = torch.arange(world).view(-1, tensor_size).t().contiguous()
    mesh = DeviceMesh(device, places, mesh_dim_names=(TENSOR, SHARD))
    limit_waiting(mesh, timeout_s)
    return mesh
