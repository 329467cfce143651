"""A switch of PyTorch: sums on a GPU in a fixed order."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_FILL: Any = torch.utils.deterministic


@contextmanager
def in_fixed_order() -> Generator[None]:
    """Kernels that are launched here add in a fixed order; those that cannot raise an error.

    Some take no other word for it. The switch is the process's, so it is on for single calls:
    elsewhere it would slow down, or refuse, what repeats anyway.
    """
    before = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    is_filling = _FILL.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _FILL.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _FILL.fill_uninitialized_memory = is_filling
        torch.use_deterministic_algorithms(before, warn_only=is_warning)
