"""Fused forwards of decoder layers: what a recognised module does instead of its own forward.

Each function is bound to one module and reads that module's own parts, so that names, parameters
and submodules stay those of Hugging Face. What fusing decided is in a record on the module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from luyen.models.attention import ATTENTION, AttentionWindow
from luyen.models.fused.ops import (
    Activation,
    HeadNorms,
    Heads,
    Joint,
    NormStyle,
    add_rms_norm,
    apply_rotary,
    gated,
    gated_pair,
    rotated_heads,
)
from luyen.models.fused.packed_linear import PackedLinear

# Attention with rotary positions applied by our kernel.


@runtime_checkable
class JointAttention(Protocol):
    """An attention context that would rather have queries and keys before they are turned."""

    def attend_joint(
        self, layer: int, joint: Joint, scale: float, window: AttentionWindow
    ) -> Tensor:
        """`[1, tok, heads, width]`, as `attend` gives it for the turned heads."""
        ...


_FUNCTIONS = AttentionInterface()
"""Attention functions by name, those registered later included."""

_READY = "luyen_normed"
"""Attribute of a hidden state whose norm is already known: the norm module and its result."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """How an attention module makes queries, keys and values.

    Example:
        >>> AttentionPlan(heads=Heads(queries=4, keys=2, width=16), extras=lambda m: {}).is_half
        False
    """

    heads: Heads
    """Numbers of heads."""
    extras: Callable[[Any], dict[str, Any]]
    """Keyword arguments that this architecture gives to the attention function."""
    head_norm: NormStyle | None = None
    """How `q_norm` and `k_norm` are written, where there are any."""
    is_rotated: bool = True
    """False in a layer without positions (SmolLM3)."""
    is_half: bool = False
    """Whether cosines come for one half of a head only (gpt-oss)."""
    packed: PackedLinear | None = None
    """The three projections as one; None where each is called."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpPlan:
    """How a gated MLP is computed.

    Example:
        >>> MlpPlan(activation="silu").packed is None
        True
    """

    activation: Activation
    """Function on the gate."""
    packed: PackedLinear | None = None
    """Gate and up as one; None where each is called."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPlan:
    """Where the norms of a decoder layer stand.

    Example:
        >>> LayerPlan(before_mlp="post_attention_layernorm", next_norm=None).after_mlp is None
        True
    """

    before_mlp: str
    """Norm of the residual stream after attention was added."""
    next_norm: nn.Module | None
    """The norm that reads this layer's output; None where it is not fused."""
    after_attention: str | None = None
    """Norm of attention's output, before it is added (Gemma)."""
    after_mlp: str | None = None
    """Norm of the MLP's output, before it is added (Gemma)."""


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm; taken from the hidden state where the layer before has made it."""
    ready = vars(hidden_states).get(_READY)
    if ready is not None and ready[0] is self:
        return ready[1]
    return add_norm(self, hidden_states, None)[0]


def add_norm(norm: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """A fused norm module over the sum, and the sum."""
    style: NormStyle = norm.luyen_plan
    return add_rms_norm(hidden, residual, norm.weight, style)


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """`down(act(gate(x)) * up(x))`."""
    plan: MlpPlan = self.luyen_plan
    if plan.packed is not None:
        return self.down_proj(gated(plan.packed(x), plan.activation))
    return self.down_proj(gated_pair(self.gate_proj(x), self.up_proj(x), plan.activation))


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, Any]:
    """Projections, rotation, and the attention function registered with transformers.

    Called with a cache of transformers or with one of its own functions, by the `hf` engine, the
    module does what its class does.
    """
    if past_key_values is not None or self.config._attn_implementation != ATTENTION:
        return type(self).forward(
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **rest,
        )
    plan: AttentionPlan = self.luyen_plan
    batch = hidden_states.shape[:-1]
    angles, rows = _angles(position_embeddings, batch), hidden_states.flatten(0, -2)
    context = rest.get("luyen_context")
    if isinstance(context, JointAttention) and (joint := _joint(plan, rows, angles)) is not None:
        window = _window(**plan.extras(self))
        out = context.attend_joint(self.layer_idx, joint, self.scaling, window)
        return self.o_proj(out.reshape(*batch, -1)), None
    flat = _heads(self, plan, rows, angles)
    attend: Any = _FUNCTIONS[ATTENTION]
    out, weights = attend(
        self,
        *(x.unflatten(0, batch).transpose(1, 2) for x in flat),
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        **plan.extras(self),
        **rest,
    )
    return self.o_proj(out.reshape(*batch, -1)), weights


def layer_forward(self: Any, hidden_states: Tensor, **rest: Any) -> Tensor:
    """A decoder layer whose residual additions are part of the norms after them.

    Without gradients the last addition is made together with the next layer's norm, which finds
    it on the hidden state. With gradients it is not: a checkpointed layer is computed again alone.
    Both ways give the same bits.
    """
    plan: LayerPlan = self.luyen_plan
    normed = self.input_layernorm(hidden_states)
    mixed, _ = self.self_attn(hidden_states=normed, **rest)
    if plan.after_attention is not None:
        mixed = getattr(self, plan.after_attention)(mixed)
    normed, residual = add_norm(getattr(self, plan.before_mlp), mixed, hidden_states)
    out = self.mlp(normed)
    if plan.after_mlp is not None:
        out = getattr(self, plan.after_mlp)(out)
    if plan.next_norm is None or torch.is_grad_enabled():
        return residual + out
    ready, total = add_norm(plan.next_norm, out, residual)
    vars(total)[_READY] = (plan.next_norm, ready)
    return total


def _angles(
    embeddings: tuple[Tensor, Tensor] | None, batch: torch.Size
) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines `[tok, width]`, one row a token."""
    if embeddings is None:
        return None
    cos, sin = (x.expand(*batch, -1).flatten(0, -2) for x in embeddings)
    return cos, sin


def _joint(plan: AttentionPlan, flat: Tensor, angles: tuple[Tensor, Tensor] | None) -> Joint | None:
    """The projection before it is turned; None where it is not one, or normed by head."""
    if plan.packed is None or plan.head_norm is not None or not plan.is_rotated or angles is None:
        return None
    cos, sin = angles
    rotated = _rotated(plan, angles)
    return Joint(qkv=plan.packed(flat), cos=cos, sin=sin, heads=plan.heads, rotated=rotated)


def _window(
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> AttentionWindow:
    """What an architecture adds to attention, by the names of transformers."""
    return AttentionWindow(sliding=sliding_window, softcap=softcap, sinks=s_aux)


def _heads(
    module: Any, plan: AttentionPlan, flat: Tensor, angles: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[tok, heads, width]`."""
    if plan.packed is not None and plan.is_rotated and angles is not None:
        rotated = _rotated(plan, angles)
        if plan.head_norm is None or rotated == plan.heads.width:
            norms = _norms(module, plan.head_norm)
            return rotated_heads(plan.packed(flat), *angles, plan.heads, rotated, norms)
    if plan.packed is not None:
        q, k, v = plan.heads.split(plan.packed(flat))
    else:
        made = (module.q_proj(flat), module.k_proj(flat), module.v_proj(flat))
        q, k, v = (x.unflatten(-1, (-1, plan.heads.width)) for x in made)
    if plan.head_norm is not None:
        q, k = module.q_norm(q), module.k_norm(k)
    if plan.is_rotated and angles is not None:
        q, k = apply_rotary(q, k, *angles, _rotated(plan, angles))
    return q, k, v


def _rotated(plan: AttentionPlan, angles: tuple[Tensor, Tensor]) -> int:
    """Numbers of a head that turn."""
    return angles[0].shape[-1] * (2 if plan.is_half else 1)


def _norms(module: Any, style: NormStyle | None) -> HeadNorms | None:
    if style is None:
        return None
    return HeadNorms(query=module.q_norm.weight, key=module.k_norm.weight, style=style)
