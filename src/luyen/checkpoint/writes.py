"""How the files of a state reach the disk: at once, or later from copies that are made now."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, final

from torch import Tensor

from luyen.checkpoint.shards import write_shard
from luyen.checkpoint.staging import Staging


class Writes(Protocol):
    """Takes the files of a state, whose folders are there."""

    def tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """A file of tensors by name."""
        ...

    def text(self, file: Path, text: str) -> None:
        """A file of text."""
        ...


@final
class AtOnce:
    """Every file is written when it is given."""

    def tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write it; an OSError when the disk refuses."""
        write_shard(file, tensors)

    def text(self, file: Path, text: str) -> None:
        """Write it; an OSError when the disk refuses."""
        file.write_text(text, encoding="utf-8")


@final
class Later:
    """Files wait for `write`, with their tensors as they were when they were given.

    Copies lie in main memory, which is used again: what was given last must be written before
    anything new is given.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], Staging] = {}
        self._waiting: list[Callable[[], object]] = []

    def tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors."""
        # Files of the same name hold the same kinds of tensors in every checkpoint.
        staging = self._copies.setdefault((file.parent.name, file.name), Staging())
        self._waiting.append(partial(write_shard, file, staging.copy(dict(tensors))))

    def text(self, file: Path, text: str) -> None:
        """Keep the text."""
        self._waiting.append(partial(file.write_text, text, encoding="utf-8"))

    def write(self) -> None:
        """Write all that waits, in the order it came; an OSError when the disk refuses."""
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()

    def forget(self) -> None:
        """Nothing waits any more."""
        self._waiting = []
