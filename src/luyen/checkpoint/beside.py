"""One rank's part of a checkpoint, written by a thread of the rank while it goes on training.

What ranks must agree on (who writes which part, and the index of all) is settled while the state is
copied, on the thread that trains. The thread that writes talks to nobody: its collectives would
mix with those of training.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

from luyen.base.files import writing
from luyen.checkpoint.aside import Aside
from luyen.checkpoint.writes import Later, Writes


@final
class BesideWriter:
    """Writes one state after the other; whoever begins a new one must have seen the last one done.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> beside = BesideWriter()
        >>> folder = Path(tempfile.mkdtemp())
        >>> beside.begin(folder, lambda writes: writes.text(folder / "note", "kept"))
        >>> while not beside.is_done():
        ...     pass
        >>> (folder / "note").read_text()
        'kept'
    """

    def __init__(self) -> None:
        self._later = Later()
        # A process that is ended takes it along: what it wrote alone is no checkpoint.
        self._aside = Aside(ends_with_process=True)

    def begin(self, folder: Path, fill: Callable[[Writes], None]) -> None:
        """Copy what `fill` gives, and return: it may be changed while it is written.

        `folder` is named where the disk refuses.
        """
        assert self.is_done(), "the state before is still being written"
        self._later.forget()
        fill(self._later)
        self._aside.begin(partial(self._write, folder))

    def is_done(self) -> bool:
        """Whether everything is written; raises what stopped it, once."""
        if self._aside.is_busy():
            return False
        self._aside.wait()
        return True

    def _write(self, folder: Path) -> None:
        with writing(folder, field="checkpoint"):
            self._later.write()
