"""Whoever wants to know which checkpoints come and go."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, final


class Watcher(Protocol):
    """Is told which checkpoints there are, by whoever writes them."""

    def kept(self, path: Path, going: Sequence[Path] = ()) -> None:
        """This one is whole and in its place; those are about to be taken away for it."""
        ...

    def going(self, path: Path) -> None:
        """This one is about to be taken away from its place."""
        ...


@final
class Nobody:
    """Does not listen."""

    def kept(self, path: Path, going: Sequence[Path] = ()) -> None:
        """Nothing is done."""

    def going(self, path: Path) -> None:
        """Nothing is done."""


NOBODY = Nobody()
