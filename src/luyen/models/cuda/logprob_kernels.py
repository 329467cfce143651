"""Log-probabilities of given tokens from rows of logits, and their gradient, on CUDA.

One pass over the logits gives all scores, one more the gradient, in place.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shared by scoring and sampling: the value of a logit, sums of a row, a log-probability.
#
# The sums have no order: a term is rounded to a fixed grain before it is added, and float64
# then holds every partial sum without rounding. The bits of a log-probability depend on the
# numbers of its row alone, not on layouts, other rows or the calling kernel.
#
# Every kernel runs without fused multiply-add, which a compiler may use in one and not in the
# other.

# pyright: reportMissingImports=false, reportIndexIssue=false


CHUNK = tl.constexpr(4096)
"""Columns whose sums one program computes. Another number gives other last bits."""
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""How every kernel is launched."""
_FINE = tl.constexpr(2.0**-17)
"""float32 numbers from here on are multiples of 2**-40; 4096 of those up to 1 add exactly."""
_COARSE = tl.constexpr(2.0**20)
"""A smaller float64 plus this is a multiple of 2**-32; 512 of those up to 4096 add exactly."""
_MOST_CHUNKS = 512


@triton.jit
def capped(stored, scale, softcap):
    """A stored logit in float32, scaled and squashed."""
    x = stored.to(tl.float32) * scale
    if softcap is not None:
        decay = tl.exp(-2.0 * tl.abs(x / softcap))
        size = softcap * ((1.0 - decay) / (1.0 + decay))
        x = tl.where(x < 0, -size, size)
    return x


@triton.jit
def inverse_temperature(temperatures, stride, greedy, row):
    """Correctly rounded reciprocal of the row's temperature; 1 for a greedy row."""
    temperature = tl.load(temperatures + row * stride)
    if greedy is not None:
        temperature = tl.where(tl.load(greedy + row) != 0, 1.0, temperature)
    return tl.div_rn(tl.full((), 1.0, tl.float32), temperature)


@triton.jit
def values(logits, columns, width, vocabulary, scale, softcap, inverse):
    """What the softmax of a row is taken of, at these columns; -inf beyond the vocabulary.

    The load is masked by `width` because a mask that ends at an odd place reads one by one.
    """
    stored = tl.load(logits + columns, mask=columns < width, other=0.0)
    x = capped(stored, scale, softcap) * inverse
    return tl.where(columns < vocabulary, x, float("-inf"))


@triton.jit
def _finite(top):
    """`top`, or 0 for -inf, which must not be subtracted from itself."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def weights(x, top):
    """exp(x - top), rounded to multiples of 2**-40."""
    weight = tl.exp(x - _finite(top))
    return tl.where(weight < _FINE, (weight + _FINE) - _FINE, weight)


@triton.jit
def _chunk_kernel(
    logits,
    stride,
    width,
    vocabulary,
    scale,
    softcap,
    temperatures,
    temperature_stride,
    greedy,
    tops,
    masses,
    spreads,
    squares,
    chunks,
):
    """Of one chunk of one row: its maximum, and sums of the exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inverse = inverse_temperature(temperatures, temperature_stride, greedy, row)
    x = values(logits + row * stride, columns, width, vocabulary, scale, softcap, inverse)
    top = tl.max(x, 0)
    weight = weights(x, top)
    place = row * chunks + chunk
    tl.store(tops + place, top)
    tl.store(masses + place, tl.sum(weight.to(tl.float64), 0).to(tl.float32))
    if spreads is not None:
        tl.store(spreads + place, tl.sum(tl.where(weight > 0, weight * (x - top), 0.0), 0))
    if squares is not None:
        tl.store(squares + place, tl.sum(weight * weight, 0))


@triton.jit
def merged(tops, masses, row, chunks, SLOTS: tl.constexpr):
    """The chunks' maxima, their factors exp(maximum - top), their masses after it, and `top`."""
    slot = tl.arange(0, SLOTS)
    highest = tl.load(tops + row * chunks + slot, mask=slot < chunks, other=float("-inf"))
    mass = tl.load(masses + row * chunks + slot, mask=slot < chunks, other=0.0)
    top = tl.max(highest, 0)
    factor = tl.exp(highest - _finite(top))
    share = mass.to(tl.float64) * factor.to(tl.float64)
    return highest, factor, (share + _COARSE) - _COARSE, top


@triton.jit
def log_probability(logits, token, scale, softcap, inverse, top, log_total):
    """Of one token of a row."""
    x = capped(tl.load(logits + token), scale, softcap) * inverse
    return ((x - top).to(tl.float64) - log_total).to(tl.float32)


def chunk_sums(
    logits: Tensor,
    temperatures: Tensor,
    greedy: Tensor | None,
    *,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> list[Tensor | None]:
    """Per row and chunk: maxima, masses and, if requested, what entropy and squares need.

    `temperatures` holds one number, or one for each row.
    """
    rows, width = logits.shape
    assert logits.stride(1) == 1
    assert 0 < vocabulary <= width
    count = chunk_count(vocabulary)
    assert count <= _MOST_CHUNKS
    is_wanted = (True, True, entropy, sum_pi_squared)
    sums = [_sums(logits, rows, count) if wanted else None for wanted in is_wanted]
    if rows > 0:
        _chunk_kernel[(rows, count)](
            logits,
            logits.stride(0),
            width,
            vocabulary,
            scale,
            softcap,
            temperatures,
            0 if temperatures.shape[0] == 1 else 1,
            greedy,
            *sums,
            count,
            **OPTIONS,
        )
    return sums


def _sums(logits: Tensor, rows: int, count: int) -> Tensor:
    return torch.empty((rows, count), dtype=torch.float32, device=logits.device)


def chunk_count(vocabulary: int) -> int:
    """Chunks that cover a vocabulary."""
    return -(-vocabulary // CHUNK.value)


def slot_count(vocabulary: int) -> int:
    """The width of a vector that holds a number for each chunk."""
    return max(2, triton.next_power_of_2(chunk_count(vocabulary)))


# pyright: reportMissingImports=false, reportIndexIssue=false


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
    row. Results are float32; the last two are None unless requested. The log-probability has the
    bits that `sample_rows` gives it.
    """
    rows = logits.shape[0]
    assert targets.shape == (rows,)
    temperatures = _one(temperature, logits)
    outputs = {"entropy": entropy, "sum_pi_squared": sum_pi_squared}
    form = {"vocabulary": vocabulary, "scale": scale, "softcap": softcap}
    sums = chunk_sums(logits, temperatures, None, **form, **outputs)
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
