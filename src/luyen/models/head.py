"""From hidden states to log-probabilities: one function for the trainer and the sampler.

Logits of a chunk of tokens exist at a time. With gradients, a chunk's logits are computed again in
the backward pass instead of being kept.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from luyen.models.fused_head import fused_scores
from luyen.models.steady import steady
from luyen.models.steady_linear import product_of

_CHUNK_NUMBERS = 1 << 24
"""Logits that exist at once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """The output layer with what an architecture does to logits after it.

    Example:
        >>> head = Head(linear=nn.Linear(2, 4, bias=False), vocabulary=3)
        >>> head.logits(torch.zeros(1, 2), temperature=1.0)
        tensor([[0., 0., 0.]], grad_fn=<SliceBackward0>)
    """

    linear: nn.Module
    """The projection to the vocabulary."""
    vocabulary: int
    """Ids the tokenizer knows; rows of the projection beyond them are never sampled or scored."""
    softcap: float | None = None
    """Logits are squashed to plus or minus this value (Gemma 2)."""
    scale: float = 1.0
    """Factor on the logits (Cohere, Granite)."""
    is_fused: bool = False
    """Whether scores are computed without keeping logits; on CUDA they always are."""

    def logits(self, hidden: Tensor, *, temperature: float) -> Tensor:
        """fp32 logits `[n, vocabulary]`, temperature applied."""
        logits = self.from_linear(self.linear(hidden))
        return logits if temperature == 1.0 else logits / temperature

    def from_linear(self, raw: Tensor) -> Tensor:
        """fp32 logits of the known vocabulary from what the projection gave."""
        logits = raw[:, : self.vocabulary].float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * steady(torch.tanh, logits / self.softcap)
        return logits


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """What is known of each target token.

    Example:
        >>> Scored(logp=torch.zeros(1), entropy=None, sum_pi_squared=None).logp
        tensor([0.])
    """

    logp: Tensor
    """Log-probability of the target."""
    entropy: Tensor | None
    """Entropy of the distribution it was drawn from, in nats."""
    sum_pi_squared: Tensor | None
    """Sum of the squared probabilities of that distribution."""


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-softmax in fp32. The only one: another formula would differ in the last bit."""
    return torch.log_softmax(logits, -1)


def score(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    sum_pi_squared: bool = False,
) -> Scored:
    """Log-probability of each target given its hidden state, chunk by chunk.

    Without `entropy_gradient` the entropy is a number to report, and keeps no logits alive.
    """
    if (hidden.is_cuda or head.is_fused) and isinstance(head.linear, nn.Linear):
        wanted = (entropy, entropy_gradient, sum_pi_squared)
        return _fused(head, head.linear, hidden, targets, temperature, wanted)
    size = max(1, _CHUNK_NUMBERS // head.vocabulary)
    chunks = [
        _maybe_checkpointed(
            head,
            h,
            t,
            temperature,
            (entropy, entropy_gradient),
            sum_pi_squared,
            hidden.shape[0] > size,
        )
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    columns = [list(column) for column in zip(*chunks, strict=True)]
    chosen, spread, peaked = (
        torch.cat([x for x in column if x is not None]) if column[0] is not None else None
        for column in columns
    )
    assert chosen is not None
    return Scored(logp=chosen, entropy=spread, sum_pi_squared=peaked)


def _fused(
    head: Head,
    linear: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    wanted: tuple[bool, bool, bool],
) -> Scored:
    """One pass over the logits, which are computed again for the gradient."""
    chosen, spread, peaked = fused_scores(
        hidden,
        linear.weight,
        linear.bias,
        targets,
        vocabulary=head.vocabulary,
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        entropy=wanted[0],
        entropy_gradient=wanted[1],
        sum_pi_squared=wanted[2],
        product=product_of(linear),
    )
    return Scored(logp=chosen, entropy=spread, sum_pi_squared=peaked)


def _maybe_checkpointed(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: tuple[bool, bool],
    sum_pi_squared: bool,
    is_long: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    def run(h: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logp = log_probabilities(head.logits(h, temperature=temperature))
        chosen = logp.gather(-1, targets[:, None])[:, 0]
        shown = logp if entropy[1] else logp.detach()
        spread = -(shown.exp() * shown).sum(-1) if entropy[0] else None
        peaked = (2 * logp.detach()).exp().sum(-1) if sum_pi_squared else None
        return chosen, spread, peaked

    if is_long and torch.is_grad_enabled():
        return checkpoint(run, hidden, use_reentrant=False)
    return run(hidden)
