"""The parameters that learn: read, restored, and compared as fingerprints.

Parameters in this process are shown as they are. Those of another process are shown by digest
(`luyen.models.weight_digests.tensor_digests`), and only such a parameter is ever digested here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.models.weight_digests import tensor_digests


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
