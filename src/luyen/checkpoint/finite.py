"""Which tensors of a state are broken: found where they lie, without copying them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def not_finite(parts: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that hold NaN or infinity; one answer a device goes to the host.

    Example:
        >>> not_finite({"actor": {"w": torch.tensor([1.0, float("nan")]), "v": torch.ones(2)}})
        ['actor/w']
    """
    ends: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in _tensors(parts, ""):
        if tensor.is_floating_point() and tensor.numel():
            # Both ends are NaN when any element is, and finite when all are.
            both = torch.stack(torch.aminmax(tensor)).float()
            ends.setdefault(tensor.device, {})[name] = both
    broken: list[str] = []
    for found in ends.values():
        sound = torch.isfinite(torch.stack(list(found.values()))).all(dim=1).tolist()
        broken += [name for name, is_sound in zip(found, sound, strict=True) if not is_sound]
    return broken


def _tensors(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor; of a sharded one what is here."""
    if isinstance(state, Tensor):
        here: Any = state.detach()
        # A DTensor of torch, whose class is slow to import.
        yield path, here.to_local() if "to_local" in dir(type(here)) else here
    elif isinstance(state, Mapping):
        for name, inner in state.items():
            yield from _tensors(inner, f"{path}/{name}" if path else str(name))
    elif isinstance(state, list | tuple):
        for index, inner in enumerate(state):
            yield from _tensors(inner, f"{path}/{index}")
