"""The most memory of its GPU that this process has held."""

import torch


def device_bytes() -> int | None:
    """Most bytes that tensors held so far; None where this process uses no GPU.

    Example:
        >>> device_bytes() is None or torch.cuda.is_initialized()
        True
    """
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
