"""AdamW whose masters and moments are in host memory and which computes on the device.

A step moves masters and moments through the device in pieces: while one piece is computed, the next
one arrives and the one before leaves. The numbers are those of AdamW on the device, bit for bit:
what a piece is does not matter, since every number is updated by itself.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from luyen.base.errors import UserError
from luyen.config.optimizer_memory import OFFLOAD_PIECE, OFFLOAD_SLOTS
from luyen.config.schema.actor_rollout_ref import OptimConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedWeight:
    """A trained weight, and where its optimizer finds what belongs to it.

    Example:
        >>> weight = torch.ones(2, dtype=torch.bfloat16)
        >>> one = OffloadedWeight(
        ...     weight=weight, master=weight.float(), collector=collector_of(weight)
        ... )
        >>> one.is_rounded
        True
    """

    weight: Tensor
    """What passes read, on the device."""
    master: Tensor
    """The fp32 number it is rounded from, in host memory; or the weight itself."""
    collector: Tensor
    """Its `grad` is the fp32 gradient, on the device."""

    @property
    def is_rounded(self) -> bool:
        """Whether the master is another tensor than the weight."""
        return self.master is not self.weight


def collector_of(weight: Tensor) -> Tensor:
    """A tensor of the weight's shape without storage of its own, whose `grad` is fp32."""
    one = torch.zeros((), dtype=torch.float32, device=weight.device)
    return one.expand(weight.shape).requires_grad_()


def host_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """An fp32 copy in host memory, which a CUDA device reaches without help of the processor."""
    copied = torch.empty(tensor.shape, dtype=torch.float32)
    if device.type == "cuda" and copied.numel():
        _lock_pages(copied)
    return copied.copy_(tensor)


def _lock_pages(tensor: Tensor) -> None:
    # torch's own pinned memory comes in powers of two: up to twice what is needed.
    cudart: Any = torch.cuda.cudart()
    place, size = tensor.data_ptr(), tensor.nbytes
    failed = cudart.cudaHostRegister(place, size, 0)
    if int(failed):
        why = f"the system does not lock {size:,} bytes of memory (CUDA error {int(failed)})"
        field = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
        raise UserError(field, True, why, "set it to false, or raise the limit of locked memory")
    weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, place)


@final
class HostAdamW(torch.optim.Optimizer):
    """AdamW over weights that are on a device, with its state in host memory.

    `state_dict` is that of `torch.optim.AdamW`, so that either continues a checkpoint of the other.
    """

    def __init__(self, weights: Sequence[OffloadedWeight], optim: OptimConfig) -> None:
        # The hyperparameters that torch.optim.AdamW has.
        defaults = {
            "lr": optim.lr,
            "betas": tuple(optim.betas),
            "eps": 1e-8,
            "weight_decay": optim.weight_decay,
        }
        super().__init__([one.master for one in weights], defaults)
        self._weights = list(weights)
        self._device = weights[0].weight.device

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every weight that has a gradient; returns nothing."""
        assert closure is None, "gradients are there already"
        pieces = [piece for one in self._weights for piece in self._pieces(one)]
        if not pieces:
            return
        # Largest pieces that occur: small models need no large buffers.
        size = max(piece.gradient.numel() for piece in pieces)
        lanes = [_Lane(size, self._device) for _ in range(min(OFFLOAD_SLOTS, len(pieces)))]
        for number, piece in enumerate(pieces):
            lanes[number % len(lanes)].update(piece, self.param_groups[0])
        for lane in lanes:
            lane.finish()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of this optimizer, or of `torch.optim.AdamW`."""
        for index, one in enumerate(self._weights):
            saved = state_dict["state"].get(index)
            self.state.pop(one.master, None)
            if saved is not None:
                moments = {name: host_copy(saved[name], self._device) for name in _MOMENTS}
                step = torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()
                self.state[one.master] = {"step": step, **moments}

    def _pieces(self, one: OffloadedWeight) -> Iterator["_Piece"]:
        if one.collector.grad is None:
            return
        state = self.state[one.master]
        if not state:
            zeros = torch.zeros((), device=one.master.device).expand(one.master.shape)
            state["step"] = torch.zeros(())
            state |= {name: host_copy(zeros, self._device) for name in _MOMENTS}
        state["step"] += 1
        kept = [state[name].view(-1) for name in _MOMENTS]
        if one.is_rounded:
            kept.append(one.master.view(-1))
        whole = [one.weight.detach().view(-1), one.collector.grad.reshape(-1), *kept]
        for weight, gradient, *host in zip(
            *(flat.split(OFFLOAD_PIECE) for flat in whole), strict=True
        ):
            yield _Piece(weight=weight, gradient=gradient, host=host, step=float(state["step"]))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Part of a weight, flat.

    Example:
        >>> zero = torch.zeros(1)
        >>> _Piece(weight=zero, gradient=zero, host=[zero, zero], step=1.0).step
        1.0
    """

    weight: Tensor
    """What passes read."""
    gradient: Tensor
    """Its fp32 gradient."""
    host: list[Tensor]
    """Its moments and, if it has one, its master."""
    step: float
    """Number of this update, from 1."""


@final
class _Lane:
    """Buffers on the device for one piece, and the streams that fill and empty them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(size, device=device) for _ in range(3)]
        self._copies = torch.cuda.Stream(device) if self._is_cuda else None
        if self._copies is not None:  # buffers may be memory that the device still reads
            self._copies.wait_stream(torch.cuda.current_stream(device))

    def update(self, piece: _Piece, group: dict[str, Any]) -> None:
        """Queue the update of a piece, after that of the piece before in this lane."""
        own = [buffer[: piece.gradient.numel()] for buffer in self._buffers[: len(piece.host)]]
        with self._copying():
            for buffer, host in zip(own, piece.host, strict=True):
                buffer.copy_(host, non_blocking=True)
        self._wait(computing=True)
        beta1, beta2 = group["betas"]
        master = own[2] if len(own) == 3 else piece.weight
        way: dict[str, Any] = {"fused": True} if self._is_cuda else {"foreach": True}
        adamw(
            [master],
            [piece.gradient],
            [own[0]],
            [own[1]],
            [],
            [torch.full((), piece.step - 1, device=self._device if self._is_cuda else "cpu")],
            **way,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if master is not piece.weight:
            piece.weight.copy_(master)
        self._wait(computing=False)
        with self._copying():
            for buffer, host in zip(own, piece.host, strict=True):
                host.copy_(buffer, non_blocking=True)

    def finish(self) -> None:
        """Wait until host memory has the results."""
        if self._copies is not None:
            self._copies.synchronize()

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def _wait(self, *, computing: bool) -> None:
        """The computing stream waits for the copies, or the copies for it."""
        if self._copies is None:
            return
        compute = torch.cuda.current_stream(self._device)
        first, second = (self._copies, compute) if computing else (compute, self._copies)
        second.wait_stream(first)
