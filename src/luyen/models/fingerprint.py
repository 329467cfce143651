"""Which weights somebody holds: compared for nothing where they are the same memory.

Parameters in this process are shown as they are. What lies elsewhere is shown by its digest
(`luyen.models.digest.describe`), and only such a parameter is ever digested here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from luyen.base.digests import hash_value
from luyen.models.digest import describe
from luyen.models.state import trained_parameters


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
        held = self._texts({name: mine[name] for name in apart})
        meant = self._texts({name: theirs[name] for name in apart})
        return next((_difference(n, held[n], meant[n]) for n in apart if held[n] != meant[n]), None)

    @staticmethod
    def _texts(weights: Mapping[str, Tensor | str]) -> dict[str, str]:
        here = describe({n: w for n, w in weights.items() if isinstance(w, Tensor)})
        return {n: w if isinstance(w, str) else here[n] for n, w in weights.items()}


def _is_same_memory(one: Tensor | str, other: Tensor | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    places = [(w.device, w.data_ptr(), w.dtype, w.shape, w.stride()) for w in (one, other)]
    return places[0] == places[1]


def _difference(name: str, held: str, meant: str) -> str:
    """Digests end in a sum over the values; what stands before it is type and shape."""
    form, wanted = held.rpartition(" ")[0], meant.rpartition(" ")[0]
    return f"{name} is {form} instead of {wanted}" if form != wanted else f"{name} has other values"
