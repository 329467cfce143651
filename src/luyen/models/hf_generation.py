"""Generation as transformers runs it: its own attention and cache. To compare and fall back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache

from luyen.models.attention import ATTENTION
from luyen.models.padded_forward import is_near, read_states
from luyen.models.policy import Policy


@final
class HfForward:
    """Left-to-right passes over equally long sequences, with a cache that transformers keeps.

    Without a cache the whole sequence is read again at each pass.
    """

    def __init__(self, policy: Policy, *, has_cache: bool) -> None:
        """`has_cache`: what `can_cache` says of the policy."""
        self._policy = policy
        self._cache = DynamicCache(config=policy.model.config) if has_cache else None
        self._seen: list[Tensor] = []

    def logits(self, tokens: Tensor) -> Tensor:
        """fp32 logits `[rows, vocabulary]` after the tokens `[rows, new]`, which are remembered."""
        model = self._policy.model
        if self._cache is not None:
            states = read_states(model, tokens, past_key_values=self._cache, use_cache=True)
        else:
            self._seen.append(tokens)
            states = read_states(model, torch.cat(self._seen, 1), use_cache=False)
        return self._policy.head.logits(states[:, -1], temperature=1.0)


@torch.no_grad()
def can_cache(policy: Policy) -> bool:
    """Whether the cache of transformers gives what reading everything again gives.

    Mamba takes none; some architectures take one of their own, or one that leaves a state out.
    """
    tokens = torch.tensor([[1, 2, 0, 2, 1]], device=policy.device)
    whole = HfForward(policy, has_cache=False).logits(tokens)
    try:
        cached = HfForward(policy, has_cache=True)
        cached.logits(tokens[:, :3])
        cached.logits(tokens[:, 3:4])
        return is_near(cached.logits(tokens[:, 4:]), whole)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False


@contextmanager
def hf_attention(policy: Policy) -> Iterator[None]:
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
