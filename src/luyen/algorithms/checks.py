"""Refusals by name: shapes that do not match, and NaN or infinity where it would count."""

import torch
from torch import Tensor

from luyen.base.errors import UserError


def require_same_shape(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Raise with both shapes unless x has the shape of `like`."""
    if x.shape != like.shape:
        raise UserError(
            name,
            tuple(x.shape),
            f"its shape differs from {like_name} {tuple(like.shape)}",
            "pass tensors over the same tokens",
        )


def require_float(name: str, x: Tensor) -> None:
    """Raise unless x is a floating-point tensor."""
    if not x.dtype.is_floating_point:
        raise UserError(name, str(x.dtype), "it must be a floating-point tensor", "cast it first")


def require_finite(name: str, x: Tensor, mask: Tensor | None = None) -> None:
    """Raise if x holds NaN or infinity where `mask` is True (everywhere without a mask).

    This waits for the device: call it at the edges of a step, never inside a micro-batch loop.
    """
    bad = ~torch.isfinite(x)
    if mask is not None:
        bad = bad & mask
    if bool(bad.any()):
        where = [int(index) for index in bad.nonzero()[0]]
        raise UserError(
            name,
            x[tuple(where)].item(),
            f"not finite at position {where} ({int(bad.sum())} such positions count)",
            "a value that could not be computed is a fault: drop the sample, do not average it",
        )
