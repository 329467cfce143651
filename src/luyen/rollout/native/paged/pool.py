"""The memory behind the pages: one tensor for all layers, sized by demand and by what is free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.kernels import Window
from luyen.models.paged import PAGE, Pages, sent
from luyen.models.policy import Policy

_MARGIN = 0.9
"""Share of the free memory that pages may take: kernels need some beside them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a token leaves behind in every layer.

    Example:
        >>> CacheShape(layers=30, heads=3, width=64, dtype=torch.bfloat16).page_bytes
        1474560
    """

    layers: int
    """Attention layers."""
    heads: int
    """Heads of keys and values."""
    width: int
    """Numbers of a head."""
    dtype: torch.dtype
    """Of keys and values."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return 2 * self.layers * self.heads * self.width * PAGE * self.dtype.itemsize


@final
class _Recorder:
    """An attention that attends to nothing and writes down what the layers ask of it."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, torch.dtype]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """Zeros of the right shape."""
        del scale, window
        self.seen[layer] = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@torch.no_grad()
def cache_shape(policy: Policy) -> CacheShape:
    """What the model's layers keep of a token; a UserError if they keep different things."""
    recorder = _Recorder()
    token = torch.zeros(1, dtype=torch.int64, device=policy.device)
    policy.hidden(token, token, recorder)
    kinds = set(recorder.seen.values())
    if len(kinds) != 1 or len({width for _, *width, _ in kinds for width in width}) != 1:
        raise UserError(
            "actor_rollout_ref.rollout.name",
            "native",
            "the layers of this model keep keys and values of different sizes, and pages of the "
            "embedded engine have one size",
            "set it to hf",
        )
    heads, width, _, dtype = kinds.pop()
    return CacheShape(layers=len(recorder.seen), heads=heads, width=width, dtype=dtype)


@final
class KeyValues:
    """Pages of every layer."""

    def __init__(self, shape: CacheShape, pages: int, *, device: torch.device) -> None:
        # Zeros, not garbage: what a masked key holds is multiplied by 0, and NaN times 0 is NaN.
        self._all = torch.zeros(
            (shape.layers, 2, pages, shape.heads, PAGE, shape.width),
            dtype=shape.dtype,
            device=device,
        )

    @property
    def address(self) -> int:
        """Where the pages lie in the device's memory."""
        return self._all.data_ptr()

    def layer(self, index: int) -> Pages:
        """The pages of a layer."""
        return Pages(keys=self._all[index, 0], values=self._all[index, 1])

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target), in every layer."""
        if pages:
            source, target = sent(list(pages), self._all.device).T
            self._all[:, :, target] = self._all[:, :, source]


def affordable_pages(policy: Policy, shape: CacheShape, *, utilization: float, held: int) -> int:
    """Pages that a share of the device holds beside the policy's weights, and that fit now.

    `held` are pages there are already, whose memory may be used again.
    """
    device = policy.device
    if device.type != "cuda":
        return 1 << 16
    free, total = torch.cuda.mem_get_info(device)
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = utilization * total - weights
    fits = _MARGIN * (free + unused) + held * shape.page_bytes
    return max(0, int(min(share, fits))) // shape.page_bytes
