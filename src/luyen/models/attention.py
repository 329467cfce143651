"""The one attention function that every Hugging Face model calls, in training and in generation.

Models pass their forward keyword arguments on to it, so the context travels with the call: a global
could change before a checkpointed layer is recomputed, and gradients would be silently wrong.
"""

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from luyen.models.kernels import Window

ATTENTION = "luyen"
"""Name under which the function is registered with transformers."""


class AttentionContext(Protocol):
    """Knows which tokens see each other, and where keys and values are kept."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    luyen_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as the context of this call says; a call without one is a mistake of ours."""
    assert luyen_context is not None, "a model was called without an attention context"
    assert dropout == 0.0, "dropout in attention makes log-probabilities random"
    if attention_mask is not None:
        raise ValueError("the model makes a mask of its own, which may hold a bias we do not know")
    layer: Any = module
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = Window(sliding=sliding_window, softcap=softcap, sinks=s_aux)
    return luyen_context.attend(layer.layer_idx, query, key, value, scale, window), None


def use_our_attention(model: PreTrainedModel) -> None:
    """Make every attention layer of the model call `attention`."""
    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
