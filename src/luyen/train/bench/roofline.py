"""The floor under a measurement: bytes that must move and operations that must happen."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from luyen.models.policy import Policy
from luyen.rollout.native.paged.pool import cache_shape


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device reached when it did nothing else.

    Example:
        >>> Ceilings(bytes_per_second=4.3e12, flops_per_second=7.9e14).bytes_per_second
        4300000000000.0
    """

    bytes_per_second: float
    """A large copy, bytes read and written."""
    flops_per_second: float
    """A large matrix product in the model's type."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of a model decides the floor.

    Example:
        >>> Sizes(parameters=10, weight_bytes=20, token_bytes=4, vocabulary=8).weight_bytes
        20
    """

    parameters: int
    """Numbers that take part in a forward pass."""
    weight_bytes: int
    """Bytes of them."""
    token_bytes: int
    """Bytes of keys and values of one token, over all layers."""
    vocabulary: int
    """Size of a row of logits."""

    @classmethod
    def of(cls, policy: Policy) -> "Sizes":
        """Of a policy; an input embedding that is not the head as well is looked up, not read."""
        shape = cache_shape(policy)
        net: Any = policy.model
        table, head = net.get_input_embeddings().weight, net.get_output_embeddings().weight
        used = [p for p in policy.parameters() if p is not table or table is head]
        return cls(
            parameters=sum(p.numel() for p in used),
            weight_bytes=sum(p.numel() * p.element_size() for p in used),
            token_bytes=2 * shape.layers * shape.heads * shape.width * shape.dtype.itemsize,
            vocabulary=policy.head.vocabulary,
        )

    def decode_bytes(self, steps: int, drawn: int, contexts: int) -> float:
        """Weights once a step, every key once a token, logits written and read once (2 bytes)."""
        return steps * self.weight_bytes + contexts * self.token_bytes + drawn * self.vocabulary * 4

    def update_flops(self, tokens: int) -> float:
        """Two a weight forward, four backward, for each token; attention comes on top."""
        return 6.0 * self.parameters * tokens


def measure_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large product, each the best of several."""
    is_gpu = device == "cuda"
    count, side = ((1 << 30), 8192) if is_gpu else ((1 << 26), 1024)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device).to(dtype)
    copy = best_seconds(lambda: target.copy_(source), device)
    product = best_seconds(lambda: torch.mm(a, a), device)
    return Ceilings(bytes_per_second=2 * count / copy, flops_per_second=2 * side**3 / product)


def best_seconds(action: Callable[[], object], device: str, *, repeats: int = 5) -> float:
    """The shortest of several runs, the device's work included; one run before them warms up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def wait(device: str) -> None:
    """Until the device has done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Count the most memory in use from here on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """Most memory in use since `reset_peak`; 0 where it is not counted."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0
