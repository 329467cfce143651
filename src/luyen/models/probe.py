"""Whether a model can be packed: three short forward passes that show what a config cannot.

Some architectures compute attention on their own, keep a running state, or do something to logits
that we do not know. Packed sequences would then leak into each other, in silence.
"""

from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from luyen.base.errors import UserError
from luyen.models.head import Head
from luyen.models.kernels import Window
from luyen.models.packed import PackedContext, packed_positions
from luyen.models.unpacked import is_near

_KINDS = {"full_attention", "sliding_attention"}


@final
class _Witness:
    """Attends as a packed context does, and remembers which layers called it and how."""

    def __init__(self, context: PackedContext) -> None:
        self._context = context
        self.windows: dict[int, Window] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        self.windows[layer] = window
        return self._context.attend(layer, query, key, value, scale, window)


@torch.no_grad()
def refuse_what_cannot_be_packed(model: PreTrainedModel, head: Head | None) -> None:
    """A UserError when packed sequences would not give what the model alone gives.

    Without a `head` only hidden states are compared: nobody makes logits of them.
    """
    try:
        why = _fault(model, head)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = f"it cannot run on packed sequences ({type(error).__name__}: {error})"
    if why is not None:
        config: Any = model.config
        raise UserError(
            "actor_rollout_ref.model.path",
            f"{config.name_or_path} ({config.model_type})".strip(),
            why,
            "set actor_rollout_ref.rollout.name to hf: slower, through transformers itself",
        )


def _fault(model: PreTrainedModel, head: Head | None) -> str | None:
    config: Any = model.config.get_text_config()
    given: dict[str, Any] = config.to_dict()
    kinds: list[str] = given.get("layer_types") or ["full_attention"] * config.num_hidden_layers
    if not set(kinds) <= _KINDS:
        return f"its layers are of a kind we do not know: {sorted(set(kinds) - _KINDS)}"
    base: Any = model.base_model
    witness = _witness(model, (3, 2))
    together = base(**_tokens(model, (3, 2)), luyen_context=witness).last_hidden_state[0, 3:]
    if set(witness.windows) != set(range(config.num_hidden_layers)):
        return "not all of its layers call the attention function that transformers lets us set"
    deaf = [i for i, k in enumerate(kinds) if k[0] == "s" and not witness.windows[i].sliding]
    if deaf:
        return f"layers {deaf} are said to have a sliding window and attend to everything"
    if not bool(together.isfinite().all()):
        return f"its weights are finite, and what it makes of them is not in {together.dtype}"
    one = _tokens(model, (2,))
    alone = base(**one, luyen_context=_witness(model, (2,))).last_hidden_state[0]
    if not is_near(together, alone):
        return "a packed sequence changes with the one before it: the model keeps a running state"
    if head is None:
        return None
    # The model's own logits against ours: a scale or a cap that we do not know would show.
    whole: Any = model
    logits = whole(**one, luyen_context=_witness(model, (2,))).logits[0, :, : head.vocabulary]
    if not is_near(head.logits(alone, temperature=1.0), logits):
        return "it does something to its logits that we do not know"
    return None


def _tokens(model: PreTrainedModel, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Sequences that end in the same two tokens."""
    device = next(model.parameters()).device
    tokens = torch.tensor([1, 2, 0, 2, 1][-sum(lengths) :], device=device)
    positions = packed_positions(lengths, device)
    return {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}


def _witness(model: PreTrainedModel, lengths: tuple[int, ...]) -> _Witness:
    return _Witness(PackedContext.of(lengths, device=next(model.parameters()).device))
