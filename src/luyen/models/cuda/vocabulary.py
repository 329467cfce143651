"""Scores of given tokens from rows of logits, and their gradient, on CUDA.

One pass over the logits gives all scores, one more the gradient, in place.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.cuda.vocabulary_sums import (
    CHUNK,
    OPTIONS,
    capped,
    chunk_count,
    chunk_sums,
    inverse_temperature,
    log_probability,
    merged,
    slot_count,
)


@triton.jit
def _score_kernel(
    logits,
    stride,
    scale,
    softcap,
    temperatures,
    spacing,
    targets,
    tops,
    masses,
    spreads,
    squares,
    logps,
    lses,
    entropies,
    peaks,
    chunks,
    SLOTS: tl.constexpr,
):
    """Scores of one row's target, from the sums of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    highest, factor, mass, top = merged(tops, masses, row, chunks, SLOTS)
    total = tl.sum(mass, 0)
    log_total = tl.log(total)
    inverse = inverse_temperature(temperatures, spacing, None, row)
    token = tl.load(targets + row)
    logp = log_probability(logits + row * stride, token, scale, softcap, inverse, top, log_total)
    tl.store(logps + row, logp)
    tl.store(lses + row, (top + log_total).to(tl.float32))
    slot = tl.arange(0, SLOTS)
    if entropies is not None:
        spread = tl.load(spreads + row * chunks + slot, mask=slot < chunks, other=0.0)
        below = tl.where(mass > 0, factor * spread + (highest - top) * mass, 0.0)
        tl.store(entropies + row, (log_total - tl.sum(below, 0) / total).to(tl.float32))
    if peaks is not None:
        square = tl.load(squares + row * chunks + slot, mask=slot < chunks, other=0.0)
        peak = tl.sum(factor.to(tl.float64) * factor * square, 0) / (total * total)
        tl.store(peaks + row, peak.to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits,
    stride,
    width,
    vocabulary,
    scale,
    softcap,
    temperatures,
    targets,
    lses,
    entropies,
    logp_gradients,
    entropy_gradients,
):
    """Overwrites one chunk of one row's logits with the gradient of the loss."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inverse = inverse_temperature(temperatures, 0, None, row)
    start = logits + row * stride
    stored = tl.load(start + columns, mask=columns < width, other=0.0)
    squashed = capped(stored, scale, softcap)
    below = squashed * inverse - tl.load(lses + row)
    p = tl.exp(below)
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    gradient = tl.load(logp_gradients + row) * (hit - p)
    if entropy_gradients is not None:
        inner = p * (below + tl.load(entropies + row))
        gradient -= tl.load(entropy_gradients + row) * tl.where(p > 0, inner, 0.0)
    gradient *= scale * inverse
    if softcap is not None:
        gradient *= 1.0 - (squashed / softcap) * (squashed / softcap)
    gradient = tl.where(columns < vocabulary, gradient, 0.0)
    tl.store(start + columns, gradient, mask=columns < width)


def score_rows(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    temperature: float | Tensor,
    entropy: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each row's target, log-sum-exp, entropy and sum of squared probabilities.

    Only the first `vocabulary` columns count. `temperature` may be a tensor of one number for each
    row. Results are float32; the last two are None unless
    asked for. The log-probability has the bits that `sample_rows` gives it.
    """
    rows = logits.shape[0]
    assert targets.shape == (rows,)
    temperatures = _one(temperature, logits)
    asked = {"entropy": entropy, "sum_pi_squared": sum_pi_squared}
    form = {"vocabulary": vocabulary, "scale": scale, "softcap": softcap}
    sums = chunk_sums(logits, temperatures, None, **form, **asked)
    is_wanted = (True, True, entropy, sum_pi_squared)
    logp, lse, spread, peaked = (_scores(logits) if wanted else None for wanted in is_wanted)
    assert logp is not None
    assert lse is not None
    if rows > 0:
        _score_kernel[(rows,)](
            logits,
            logits.stride(0),
            scale,
            softcap,
            temperatures,
            0 if temperatures.shape[0] == 1 else 1,
            targets.contiguous(),
            *sums,
            logp,
            lse,
            spread,
            peaked,
            chunk_count(vocabulary),
            slot_count(vocabulary),
            **(OPTIONS | {"num_warps": 1}),
        )
    return logp, lse, spread, peaked


def score_rows_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    *,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Overwrite logits with the gradient of the loss with respect to them.

    `lse` and `entropy` are what `score_rows` gave. Columns beyond the vocabulary get 0.
    """
    rows, width = logits.shape
    assert logits.stride(1) == 1
    assert grad_entropy is None or entropy is not None
    if rows == 0:
        return
    _gradient_kernel[(rows, chunk_count(width))](
        logits,
        logits.stride(0),
        width,
        vocabulary,
        scale,
        softcap,
        _one(temperature, logits),
        targets.contiguous(),
        lse,
        entropy,
        grad_logp.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
        **OPTIONS,
    )


def _one(temperature: float | Tensor, logits: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature
    return torch.full((1,), temperature, dtype=torch.float32, device=logits.device)


def _scores(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
