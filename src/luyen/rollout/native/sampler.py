"""Token sampling: one uniform number per token, from a counter and not from a state.

Which tokens come out depends on the row's logits, its key and its position, and on nothing else in
the batch. There is no noise per vocabulary entry: on a CPU that costs more than the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.models.head import log_probabilities

_BLOCK = 256
_STEP, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""The constants of luyen.base.seeds as signed 64-bit integers."""


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """`luyen.base.seeds.uniform` for whole tensors: float64 in [0, 1)."""
    z = keys + (positions + 1) * _STEP
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    z = z ^ _shifted(z, 31)
    return _shifted(z, 32).double() / 2**32


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TruncationLimits:
    """Truncation of each row's distribution.

    Example:
        >>> top_p, min_p = torch.ones(1, 1), torch.zeros(1, 1)
        >>> TruncationLimits(top_k=torch.tensor([[2]]), top_p=top_p, min_p=min_p).top_k
        tensor([[2]])
    """

    top_k: Tensor
    """`[rows, 1]` tokens to keep; the vocabulary's size keeps all."""
    top_p: Tensor
    """`[rows, 1]` mass to keep."""
    min_p: Tensor
    """`[rows, 1]` smallest probability relative to the likeliest."""
    barred: Tensor | None = None
    """`[rows, ids]` tokens that may not be sampled, -1 where there is none; None: all may be."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NextTokens:
    """One token for each row.

    Example:
        >>> NextTokens(tokens=torch.tensor([3]), logps=torch.tensor([-0.5]), kept=None).kept is None
        True
    """

    tokens: Tensor
    """Token ids."""
    logps: Tensor
    """Their log-probability under the full softmax."""
    kept: Tensor | None
    """Mass of the full softmax that truncation keeps; None without truncation."""
    top: "TopTokens | None" = None
    """The likeliest tokens of each row; None where they are not wanted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The likeliest tokens of each row, sorted by log-probability, then by id.

    Example:
        >>> likeliest(torch.tensor([[-1.0, -0.5, -1.0, -9.0]]), 3).ids
        tensor([[1, 0, 2]])
    """

    ids: Tensor
    """`[rows, count]` token ids."""
    logps: Tensor
    """Their log-probabilities under the full softmax."""

    def with_logps(self, logps: Tensor) -> "TopTokens":
        """The same tokens with these log-probabilities, sorted by them."""
        by_id = self.ids.argsort(-1)
        ids, logps = self.ids.gather(-1, by_id), logps.gather(-1, by_id)
        order = torch.sort(logps, dim=-1, descending=True, stable=True).indices
        return TopTokens(ids=ids.gather(-1, order), logps=logps.gather(-1, order))


def likeliest(logp: Tensor, count: int) -> TopTokens:
    """The `count` likeliest tokens of each row of log-probabilities, or all there are.

    Log-probability and id make one whole number, so that no two tokens are equal: what a partial
    sort does with equal numbers depends on the device.
    """
    bits = logp.contiguous().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    size = logp.shape[-1]
    keys = (order << 32) + (size - 1 - torch.arange(size, device=logp.device))
    best = keys.topk(min(count, size), dim=-1).values
    ids = size - 1 - (best & 0xFFFFFFFF)
    return TopTokens(ids=ids, logps=logp.gather(-1, ids))


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    greedy: Tensor | None = None,
    limits: TruncationLimits | None = None,
    *,
    allowed: Tensor | None = None,
    top: int = 0,
    log_softmax: Callable[[Tensor], Tensor] = log_probabilities,
) -> NextTokens:
    """A token for each row of fp32 logits (temperature applied already).

    `greedy` marks rows that take the likeliest token that is not barred; None: no row does.
    `allowed` are the tokens `[rows, vocabulary]` that may be sampled at all, before other limits;
    None: all may be. The log-probability is that of the full softmax, whatever is ruled out, by
    `log_softmax`. `top` is how many of the likeliest tokens are reported.
    """
    logp = log_softmax(logits)
    probabilities = logp.exp()
    kept = None
    barred = limits.barred if limits is not None else None
    if barred is not None or allowed is not None:
        logits = logits if barred is None else mask_barred(logits, barred)
        logits = logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))
        # Not the probabilities with zeros: barred tokens may have all of the mass.
        weights = log_probabilities(logits).exp()
        weights = weights if limits is None else truncate(weights, limits)
        kept = torch.where(weights > 0, probabilities, 0.0).sum(-1)
        probabilities = weights
    elif limits is not None:
        probabilities = truncate(probabilities, limits)
        kept = probabilities.sum(-1)
    tokens = inverse_cdf(probabilities, uniform)
    if greedy is not None:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return NextTokens(
        tokens=tokens,
        logps=logp.gather(-1, tokens[:, None])[:, 0],
        kept=kept,
        top=likeliest(logp, top) if top else None,
    )


def mask_barred(logits: Tensor, barred: Tensor) -> Tensor:
    """Logits with `barred` ids `[rows, ids]` at minus infinity; what is no id bars nothing.

    The smaller of two numbers is written at each id: one may be named twice, and what is no id
    changes nothing at the place it is given. Nothing here waits for a device.
    """
    is_id = (barred >= 0) & (barred < logits.shape[-1])
    index = torch.where(is_id, barred, 0)
    values = torch.where(is_id, float("-inf"), logits.gather(-1, index))
    return logits.scatter_reduce(-1, index, values, "amin")


def sample_untruncated(logits: Tensor, uniform: Tensor, greedy: Tensor | None = None) -> NextTokens:
    """`sample_tokens` without truncation: equal but for rounding, fewer passes over the logits.

    For engines that promise no exactness. The logits are overwritten.
    """
    likeliest = logits.argmax(-1) if greedy is not None else None
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    tokens, total = _inverse(weights, uniform, torch.float32)
    if greedy is not None and likeliest is not None:
        tokens = torch.where(greedy, likeliest, tokens)
    chosen = weights.gather(-1, tokens[:, None])[:, 0].double()
    return NextTokens(tokens=tokens, logps=(chosen / total).log(), kept=None)


def truncate(probabilities: Tensor, limits: TruncationLimits) -> Tensor:
    """Probabilities with the tokens that top-k, top-p and min-p rule out set to 0.

    In vLLM's order: min-p, then top-k, then top-p of the mass that is left. The likeliest token
    always stays.
    """
    ordered, index = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    is_likely = ordered >= limits.min_p * ordered[:, :1]
    ordered = torch.where(is_likely & (rank < limits.top_k), ordered, 0.0)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    is_in = before < limits.top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)
    # Rounding must not rule anything out where top-p is off.
    is_in |= limits.top_p >= 1.0
    is_in[:, 0] = True
    return torch.zeros_like(probabilities).scatter(-1, index, torch.where(is_in, ordered, 0.0))


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """First index whose running sum exceeds `uniform` x total; never one of weight 0.

    Two levels: the running sum of blocks finds the block, the one inside it the index.
    """
    return _inverse(weights, uniform, torch.float64)[0]


def _inverse(weights: Tensor, uniform: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`inverse_cdf` and the total; `dtype` is that of the sums inside blocks."""
    rows, size = weights.shape
    if size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % _BLOCK))
    padded = weights.view(rows, -1, _BLOCK)
    blocks = padded.sum(-1, dtype=dtype).double().cumsum(-1)
    target = (uniform * blocks[:, -1])[:, None]
    block = (blocks <= target).sum(-1, keepdim=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    running = inside.cumsum(-1, dtype=torch.float64)
    place = (running <= target - before).sum(-1)
    # The two sums may round differently at a block's end: the last index with weight is meant then.
    last = _BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    return block[:, 0] * _BLOCK + torch.minimum(place, last), blocks[:, -1]
