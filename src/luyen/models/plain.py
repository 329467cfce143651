"""The model as transformers runs it: its own attention, its own cache. To compare and fall back."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache

from luyen.models.attention import ATTENTION
from luyen.models.policy import Policy


@final
class PlainForward:
    """Left-to-right passes over equally long sequences, with a cache that transformers keeps.

    A model that takes no such cache (Mamba) reads the whole sequence again at each pass.
    """

    def __init__(self, policy: Policy) -> None:
        base: Any = policy.model.base_model
        self._policy = policy
        self._takes_cache = "past_key_values" in inspect.signature(base.forward).parameters
        self._cache = DynamicCache(config=policy.model.config) if self._takes_cache else None
        self._seen: list[Tensor] = []

    def logits(self, tokens: Tensor) -> Tensor:
        """fp32 logits `[rows, vocabulary]` after the tokens `[rows, new]`, which are remembered."""
        base: Any = self._policy.model.base_model
        if self._takes_cache:
            out = base(input_ids=tokens, past_key_values=self._cache, use_cache=True)
        else:
            self._seen.append(tokens)
            out = base(input_ids=torch.cat(self._seen, 1), use_cache=False)
        return self._policy.head.logits(out.last_hidden_state[:, -1], temperature=1.0)


@contextmanager
def plain_attention(policy: Policy) -> Iterator[None]:
    """The model with the attention of transformers, and afterwards with ours again."""
    if not policy.is_packed:
        yield
        return
    policy.model.set_attn_implementation(_implementation(policy))
    try:
        yield
    finally:
        policy.model.set_attn_implementation(ATTENTION)


def _implementation(policy: Policy) -> str:
    """PyTorch's fused attention; the written-out one where the fused one would leave a cap out."""
    given: dict[str, Any] = policy.model.config.get_text_config().to_dict()
    model: Any = policy.model
    is_capped = given.get("attn_logit_softcapping") is not None
    return "eager" if is_capped or not model._supports_sdpa else "sdpa"
