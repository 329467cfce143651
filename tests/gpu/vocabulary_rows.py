"""Rows of logits for tests of vocabulary kernels, and short ways to call the kernels."""

import pytest
import torch
from torch import Tensor

from luyen.base.seeds import derive_key

PLAIN = {"scale": 1.0, "softcap": None}
FORMS = [
    (PLAIN, 1.0),
    ({"scale": 0.5, "softcap": None}, 0.7),
    ({"scale": 1.5, "softcap": 6.0}, 1.3),
]
SIZES = [7, 256, 4096, 4097, 9001, 49152, 151936]
SMALL = 9001
"""The largest vocabulary for the interpreter."""
NAN = float("nan")


def row_counts(device: str, size: int) -> tuple[int, ...]:
    """How many rows to try."""
    if device == "cpu":
        return (1, 5)
    return (1, 6) if size > 4097 else (1, 3, 70)


def dtypes(device: str) -> list[torch.dtype]:
    """bfloat16 too where there is a GPU; the interpreter is not good at it."""
    return [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32, torch.float16]


def skip_if_long(device: str, size: int) -> None:
    if device == "cpu" and size > SMALL:
        pytest.skip("too long for the interpreter")


def logits_of(
    device: str, rows: int, size: int, *, extra: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Random logits; `extra` columns after the vocabulary, and as many beyond a row, hold NaN."""
    drawn = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows * 7 + size))
    stored = torch.full((rows, size + 2 * extra), NAN)
    stored[:, :size] = drawn * 3
    return stored.to(device=device, dtype=dtype)[:, : size + extra]


def values(logits: Tensor, size: int, form: dict, temperature: Tensor | float) -> Tensor:
    """float64: what the softmax is taken of."""
    x = logits[:, :size].double() * form["scale"]
    if form["softcap"] is not None:
        x = form["softcap"] * torch.tanh(x / form["softcap"])
    return x / temperature


def targets_of(device: str, rows: int, size: int) -> Tensor:
    return torch.arange(rows, device=device) * 7919 % size


def keys_of(device: str, rows: int) -> Tensor:
    keys = [derive_key(0, "draw", row) for row in range(rows)]
    return torch.tensor([k - (1 << 64) if k >> 63 else k for k in keys], device=device)


def draw(
    logits: Tensor,
    size: int,
    form: dict,
    *,
    temperature: float | Tensor = 1.0,
    greedy: bool | Tensor = False,
    keys: Tensor | None = None,
    position: int = 5,
) -> tuple[Tensor, Tensor]:
    from luyen.models.cuda.sampling_kernels import sample_rows

    rows, device = logits.shape[0], logits.device
    if not isinstance(temperature, Tensor):
        temperature = torch.full((rows,), temperature, device=device)
    if not isinstance(greedy, Tensor):
        greedy = torch.full((rows,), greedy, device=device)
    tokens = torch.full((rows,), -1, device=device)
    logps = torch.full((rows,), NAN, device=device)
    keys = keys_of(device.type, rows) if keys is None else keys
    positions = torch.full((rows,), position, device=device)
    out = {"out_tokens": tokens, "out_logps": logps}
    sample_rows(logits, keys, positions, temperature, greedy, vocabulary=size, **form, **out)
    return tokens, logps


def logp_of(logits: Tensor, tokens: Tensor, size: int, form: dict, t: float):
    from luyen.models.cuda.logprob_kernels import score_rows

    more = {"temperature": t, "entropy": False, "sum_pi_squared": False}
    return score_rows(logits, tokens, vocabulary=size, **form, **more)[0]
