"""The door of the padded functions: `[batch, time]` tensors are checked by name and flattened."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from luyen.algorithms.checks import require_finite, require_float, require_same_shape
from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError

Groups = Tensor | Iterable[Hashable]


def clean_mask(mask: Tensor) -> Tensor:
    """The mask as booleans; a UserError unless it is `[batch, time]` of zeros and ones."""
    if mask.dim() != 2 or mask.shape[1] == 0:
        why = "it must be [batch, time] with at least one position"
        raise UserError("mask", tuple(mask.shape), why, "pass one row per sequence")
    odd = (mask != 0) & (mask != 1)
    if bool(odd.any()):
        why = "a mask holds 0 and 1 only"
        raise UserError("mask", mask[odd][0].item(), why, "pass weights as rollout_is_weights")
    return mask.bool()


def row_layout(mask: Tensor, groups: Groups) -> Layout:
    """Rows as sequences of the padded width, one after the other."""
    batch, width = mask.shape
    if isinstance(groups, Tensor):
        rows = mask.new_zeros(batch)
        require_same_shape("groups", groups, "the rows of mask", rows)
    labels: list[Hashable] = (
        [x.item() for x in groups] if isinstance(groups, Tensor) else list(groups)
    )
    if len(labels) != batch:
        why = f"mask {tuple(mask.shape)} has {batch} rows, and there are {len(labels)} labels"
        raise UserError("groups", len(labels), why, "pass one label per row")
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(label, len(numbers)) for label in labels]
    return Layout(
        mask=mask.flatten(),
        offsets=torch.arange(batch + 1, device=mask.device) * width,
        groups=torch.tensor(index, dtype=torch.int64, device=mask.device),
    )


def required_stream(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """x flattened, after checking its dtype, its shape, and that it is finite on the mask."""
    require_float(name, x)
    require_same_shape(name, x, "mask", mask)
    require_finite(name, x.detach(), mask)
    return x.flatten()


def optional_stream(name: str, x: Tensor | None, mask: Tensor) -> Tensor | None:
    """`required_stream`, or None for a stream that was not given."""
    return None if x is None else required_stream(name, x, mask)


def row_numbers(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """One finite number per row."""
    require_float(name, x)
    require_same_shape(name, x, "the rows of mask", mask.new_zeros(mask.shape[0]))
    require_finite(name, x.detach())
    return x


def optional_numbers(name: str, x: Tensor | None, mask: Tensor) -> Tensor | None:
    """`row_numbers`, or None for numbers that were not given."""
    return None if x is None else row_numbers(name, x, mask)
