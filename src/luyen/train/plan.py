"""Which rollouts make one optimizer step: whole groups, in a seeded order."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from luyen.base.seeds import derive_key, shuffled
from luyen.engine.batch import PackedBatch

T = TypeVar("T")


def mini_batches(
    batch: PackedBatch, *, groups: int, epochs: int, shuffle: bool, seed: int, step: int
) -> Iterator[PackedBatch]:
    """Parts of a step that each end in an optimizer step, `groups` prompts each.

    The weights of a part are fixed by the part, so an epoch adds up to the same gradient however a
    part is later cut into micro-batches.
    """
    labels = batch.layout.groups.tolist()
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    names = list(members)
    for epoch in range(epochs):
        order = names
        if shuffle:
            key = derive_key(seed, "mini-batches", step, epoch)
            order = [names[i] for i in shuffled(len(names), key)]
        for part in _parts(order, groups):
            chosen = [index for label in part for index in members[label]]
            yield batch if len(chosen) == len(labels) and not shuffle else batch.take(chosen)


def with_last(parts: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each part, and whether it is the last; the next one is made before a part is given.

    Example:
        >>> list(with_last("ab"))
        [('a', False), ('b', True)]
    """
    left = iter(parts)
    part = next(left, None)
    while part is not None:
        later = next(left, None)
        yield part, later is None
        part = later


def _parts(names: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
