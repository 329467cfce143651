"""One session of a run: what happens to it from outside is noted in the run directory."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from luyen.base.claims import release
from luyen.base.rundir import RunDirectory
from luyen.telemetry.notes import note
from luyen.telemetry.output import OUTPUT
from luyen.telemetry.summary import FINISHED, INTERRUPTED
from luyen.train.directory import Session
from luyen.train.interrupt import Interruption, Stopped


def own_until_wired(opened: ExitStack, session: Session) -> None:
    """As `opened` ends, release the claim; an earlier run notes why it did not go on."""
    root = session.directory.root
    opened.callback(release, root)
    opened.push(_noted(root, "before its first step", unless=session.abandon))


def note_what_happens(ending: ExitStack, directory: RunDirectory) -> None:
    """While `ending` is open, note which stream is lost, and what ends the run."""
    OUTPUT.listen(partial(note, directory.root))
    ending.callback(OUTPUT.listen, None)
    ending.push(_noted(directory.root, "in training"))


def headline(
    directory: RunDirectory, interruption: Interruption, *, step: int, last_step: int
) -> str:
    """How the session ended, for its summary; an interruption is noted."""
    if not interruption.is_wanted or step >= last_step:
        return FINISHED
    number = interruption.number
    who = signal.Signals(number).name if number is not None else "its caller"
    note(directory.root, f"interrupted by {who} after step {step} of {last_step}")
    return INTERRUPTED


_Leave = Callable[
    [type[BaseException] | None, BaseException | None, TracebackType | None], bool | None
]


def _noted(run: Path, when: str, *, unless: Callable[[], bool] = lambda: False) -> _Leave:
    def leave(
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,  # noqa: ARG001 - the form of an exit
    ) -> None:
        if kind is None or unless():
            return
        words = f"stopped by {error}" if kind is Stopped else f"{kind.__name__}: {error}"
        note(run, f"ended {when}: {words}")

    return leave
