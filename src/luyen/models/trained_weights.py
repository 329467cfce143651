"""The parameters that learn: read, restored, and compared as fingerprints.

Parameters in this process are shown as they are. Those of another process are shown by digest
(`luyen.models.weight_digests.tensor_digests`), and only such a parameter is ever digested here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.models.weight_digests import digest_numbers, tensor_digests


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that learn, by name; frozen ones come from the model's own files."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def restore_parameters(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write saved values into the parameters that learn; they keep their addresses."""
    own = trained_parameters(module)
    _demand_same({n: p.shape for n, p in own.items()}, {n: t.shape for n, t in saved.items()})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def _demand_same(own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> None:
    """A UserError that names the first parameter that a checkpoint has not, or has otherwise."""
    for name in [*own, *saved]:
        if own.get(name) == saved.get(name):
            continue
        have, has = (tuple(of[name]) if name in of else "none" for of in (own, saved))
        why = f"it holds other weights than the model: {name} is {has} there and {have} here"
        fix = "give the model and the adapter that the checkpoint was made with"
        raise UserError("checkpoint", name, why, fix)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fingerprint:
    """Every parameter that learns, adapters included, as a tensor or as its digest.

    Example:
        >>> import copy
        >>> one, two = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> Fingerprint.of(copy.deepcopy(one)).first_difference(Fingerprint.of(one)) is None
        True
        >>> Fingerprint.of(two).first_difference(Fingerprint.of(one))
        'weight has other values'
    """

    weights: Mapping[str, Tensor | str]
    """By the names of the policy's parameters."""

    @classmethod
    def of(cls, module: nn.Module) -> "Fingerprint":
        """The parameters of a module, none of them copied or looked at."""
        return cls(weights=trained_parameters(module))

    def text(self) -> str:
        """One digest of all of them, which another process can compare."""
        return hash_value(self._texts(self.weights))

    def first_difference(self, wanted: "Fingerprint") -> str | None:
        """The first parameter that is not as wanted, and how it differs; None: all are."""
        mine, theirs = self.weights, wanted.weights
        for name in theirs:
            if name not in mine:
                return f"{name} is missing"
        for name in mine:
            if name not in theirs:
                return f"{name} is not one of the trainer's"
        apart = [name for name in theirs if not _is_same_memory(mine[name], theirs[name])]
        actual = self._texts({name: mine[name] for name in apart})
        expected = self._texts({name: theirs[name] for name in apart})
        return next(
            (_difference(n, actual[n], expected[n]) for n in apart if actual[n] != expected[n]),
            None,
        )

    @staticmethod
    def _texts(weights: Mapping[str, Tensor | str]) -> dict[str, str]:
        here = tensor_digests({n: w for n, w in weights.items() if isinstance(w, Tensor)})
        return {n: w if isinstance(w, str) else here[n] for n, w in weights.items()}


def _is_same_memory(one: Tensor | str, other: Tensor | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    places = [(w.device, w.data_ptr(), w.dtype, w.shape, w.stride()) for w in (one, other)]
    return places[0] == places[1]


def _difference(name: str, actual: str, expected: str) -> str:
    """Digests end in a sum over the values; what stands before it is type and shape."""
    form, wanted = actual.rpartition(" ")[0], expected.rpartition(" ")[0]
    return f"{name} is {form} instead of {wanted}" if form != wanted else f"{name} has other values"


# Whether weights changed: keys and values that were computed with them are stale then.


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
        self._adapters: list[Any] = []
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
            self._adapters = [m for m in self._module.modules() if hasattr(m, _SWITCH)]
        marks = self._marks_now()
        is_same = marks == self._marks
        if is_same and is_idle and is_kept:
            is_same = self._sums is not None and self._sums == _sums(self._tensors)
        if not is_same:
            self._marks, self._sums = marks, None
        self.is_mixed = not is_idle and (self.is_mixed or not is_same)
        return not is_same

    def keep(self) -> None:
        """Something is kept from now on that was computed with the weights of the last `renew`."""
        if self._sums is None:
            self._sums = _sums(self._tensors)

    def _marks_now(self) -> tuple[object, ...]:
        """Where each tensor lies and how often it was written to, and which ones are in use."""
        return (
            vars(self._module).get("_is_exact"),
            *((getattr(m, _SWITCH), str(m.active_adapters)) for m in self._adapters),
            *((t.data_ptr(), t._version) for t in self._tensors),
        )


_SWITCH = "_disable_adapters"
"""Attribute of a layer with adapters (peft): whether they are turned off."""


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
