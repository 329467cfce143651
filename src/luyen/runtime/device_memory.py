"""The most memory of its GPU that this process has held."""

import torch


def device_bytes() -> int | None:
    """Most bytes that tensors held so far; None where this process uses no GPU.

    Example:
        >>> device_bytes() is None or torch.cuda.is_initialized()
        True
    """
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def release_device_memory() -> None:
    """Hand memory that the allocator caches back to the device, where other processes take it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
