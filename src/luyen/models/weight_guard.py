"""Whether weights changed: keys and values of other weights are stale then.

PyTorch counts writes to a tensor, but not all of them: a fused optimizer and a write through
`.data` leave the version as it was. So versions and addresses are compared often, which costs
nothing, and sums over all weights when something that was kept is about to be used after a pause.
"""

from collections.abc import Sequence
from typing import final

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from luyen.models.lora import adapter_layers
from luyen.models.weight_digests import digest_numbers


@final
class WeightGuard:
    """Notices that the weights of a module are no longer those that results were kept for.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> guard = WeightGuard(module)
        >>> guard.renew(is_idle=True, is_kept=False)
        True
        >>> guard.keep()
        >>> module.weight.data.zero_()  # no version counts this
        tensor([[0., 0.]])
        >>> guard.renew(is_idle=True, is_kept=True)
        True
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: list[Tensor] = []
        self._adapters: list[LoraLayer] = []
        self._marks: tuple[object, ...] = ()
        self._sums: tuple[int, ...] | None = None
        self.is_mixed = False
        """Whether work in progress began with other weights than those there are now."""

    def renew(self, *, is_idle: bool, is_kept: bool) -> bool:
        """Look at the weights; whether they changed since the last call, so that nothing is valid.

        `is_idle`: nothing is in progress. Then, if something is kept, every number is read: a fused
        optimizer or a write through `.data` increases no version.
        """
        if is_idle:
            self._tensors = [*self._module.parameters(), *self._module.buffers()]
            self._adapters = list(adapter_layers(self._module).values())
        marks = self._marks_now()
        is_same = marks == self._marks
        if is_same and is_idle and is_kept:
            is_same = self._sums is not None and self._sums == _sums(self._tensors)
        if not is_same or (is_idle and not is_kept):
            # Sums are those of the weights that kept results, and work in progress, belong to.
            self._marks, self._sums = marks, None
        self.is_mixed = not is_idle and (self.is_mixed or not is_same)
        return not is_same

    def keep(self) -> None:
        """Something may be kept from now on that is computed with the weights of the last `renew`.

        To be called when the work begins: weights may change unseen before its end.
        """
        if self._sums is None:
            self._sums = _sums(self._tensors)

    def _marks_now(self) -> tuple[object, ...]:
        """Where each tensor lies and how often it was written to, and which ones are in use."""
        return (
            vars(self._module).get("_is_exact"),
            *((m.disable_adapters, *m.active_adapters) for m in self._adapters),
            *((t.data_ptr(), t._version) for t in self._tensors),
        )


def _sums(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """A sum over the bits of each tensor: 64-bit words on a CPU, digests on a GPU."""
    some = [t.detach() for t in tensors if t.numel() > 0]
    digests = digest_numbers({str(i): t for i, t in enumerate(some) if t.is_cuda})
    return tuple(digests[str(i)] if t.is_cuda else _sum_of_words(t) for i, t in enumerate(some))


def _sum_of_words(tensor: Tensor) -> int:
    """Of 8 bytes where the tensor consists of such, which is as fast as memory."""
    flat = tensor.contiguous().view(-1)
    size = flat.element_size()
    is_whole = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(flat.view(torch.int64 if is_whole else words[size]).sum())
