"""The padded forward pass of transformers, and the probe whether a model can be packed instead.

For architectures whose attention we cannot set, or that keep a running state. A causal model makes
the same of a token whatever stands after it, so that padding on the right needs no mask, of which
each architecture has its own idea.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from luyen.base.errors import UserError
from luyen.base.process_setup import padded_length
from luyen.models.attention import AttentionWindow
from luyen.models.head import Head
from luyen.models.packed_attention import PackedContext, packed_positions

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def read_states(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """What the output layer would read, `[rows, tok, hidden]`, of tokens `[rows, tok]`."""
    base: Any = model.base_model
    if base is not model:
        return base(input_ids=tokens, **options).last_hidden_state
    # Third-party code without a declared base model: the whole model is run.
    seen: list[Tensor] = []
    output: Any = model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        whole: Any = model
        whole(input_ids=tokens, **options)
    finally:
        hook.remove()
    return seen[0]


def unpacked_hidden(
    read: Callable[[Tensor], Tensor], tokens: Tensor, lengths: Sequence[int], where: Tensor
) -> Tensor:
    """Last hidden states at the positions `where` of sequences that stand one after the other.

    Sequences of about one length are read together; `read` makes `[rows, tok, hidden]` of tokens.
    """
    rows = tokens.split([*lengths])
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            members.setdefault(padded_length(length), []).append(index)
    parts: dict[int, Tensor] = {}
    for _, indices in sorted(members.items()):
        states = read(pad_sequence([rows[i] for i in indices], batch_first=True))
        parts |= {i: states[row, : lengths[i]] for row, i in enumerate(indices)}
    return torch.cat([parts[i] for i in sorted(parts)]).index_select(0, where)


@torch.no_grad()
def refuse_what_cannot_be_read(model: PreTrainedModel, head: Head) -> None:
    """A UserError when right-padded sequences would not give what the model alone gives."""
    try:
        why = _padding_fault(model, head)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = f"it cannot run ({type(error).__name__}: {error})"
    if why is not None:
        config: Any = model.config
        named = f"{config.name_or_path} ({config.model_type})".strip()
        fix = "give a causal language model"
        raise UserError("actor_rollout_ref.model.path", named, why, fix)


def _padding_fault(model: PreTrainedModel, head: Head) -> str | None:
    device = next(model.parameters()).device
    tokens = torch.tensor([[1, 2, 0, 2, 1]], device=device)
    long = read_states(model, tokens, use_cache=False)[0]
    if not bool(long.isfinite().all()):
        return f"its weights are finite, and what it makes of them is not in {long.dtype}"
    short = read_states(model, tokens[:, :3], use_cache=False)[0]
    if not is_near(long[:3], short):
        return "what it makes of a token changes with those after it"
    whole: Any = model
    logits = whole(input_ids=tokens, use_cache=False).logits[0, :, : head.vocabulary]
    if not is_near(head.logits(long, temperature=1.0), logits):
        return "it does something to its logits that we do not know"
    return None


def is_near(a: Tensor, b: Tensor) -> bool:
    """Whether two results of the same model differ by rounding alone."""
    tolerance = _TOLERANCE.get(b.dtype, 0.1)
    size = float(b.float().abs().max()) + 1e-6
    return float((a.float() - b.float()).abs().max()) <= tolerance * size


# Packing check: three short forward passes show whether a model can be packed.
#
# Some architectures compute attention on their own, keep a running state, or do something to
# logits that we do not know. Packed sequences would then leak into each other, in silence.

_KINDS = {"full_attention", "sliding_attention"}


@final
class _Witness:
    """Attends as a packed context does, and remembers which layers called it and how."""

    def __init__(self, context: PackedContext) -> None:
        self._context = context
        self.windows: dict[int, AttentionWindow] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        self.windows[layer] = window
        return self._context.attend(layer, query, key, value, scale, window)


@torch.no_grad()
def refuse_what_cannot_be_packed(model: PreTrainedModel, head: Head | None) -> None:
    """A UserError when packed sequences would not give what the model alone gives.

    Without a `head` only hidden states are compared.
    """
    try:
        why = _packing_fault(model, head)
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


def _packing_fault(model: PreTrainedModel, head: Head | None) -> str | None:
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
