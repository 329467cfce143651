"""Kernels that are launched while the one before them still runs (programmatic dependent launch).

Such a kernel begins with `gdc_wait`, after which all that was written before is there. What it
saves is the launch itself, up to a microsecond: much where a decode step is 250 small kernels.
"""

from functools import cache

import torch
from torch import Tensor

_HOPPER = 9
"""Compute capability from which devices can do it."""


def early(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel over `x`, which must have the parameter `IS_EARLY`."""
    is_early = x.is_cuda and _can(x.device)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _HOPPER
