"""A model as transformers runs it, for training: sequences padded on the right, none packed.

For architectures whose attention we cannot set, or that keep a running state. A causal model makes
the same of a token whatever stands after it, so that padding on the right needs no mask, of which
each architecture has its own idea.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from luyen.base.errors import UserError
from luyen.base.exactness import padded_length
from luyen.models.head import Head

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def read_states(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """What the output layer would read, `[rows, tok, hidden]`, of tokens `[rows, tok]`."""
    base: Any = model.base_model
    if base is not model:
        return base(input_ids=tokens, **options).last_hidden_state
    # Code of a stranger that names no part of itself as its base: the whole model is run.
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
        why = _fault(model, head)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = f"it cannot run ({type(error).__name__}: {error})"
    if why is not None:
        config: Any = model.config
        named = f"{config.name_or_path} ({config.model_type})".strip()
        fix = "give a causal language model"
        raise UserError("actor_rollout_ref.model.path", named, why, fix)


def _fault(model: PreTrainedModel, head: Head) -> str | None:
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
