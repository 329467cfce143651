"""Checkpoint writers: in this thread, in a background thread, on each rank, in other processes."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final

from luyen.base.files import writing
from luyen.checkpoint.file_writers import DeferredWriter, FileWriter, Staging
from luyen.checkpoint.store import CheckpointStore, Unfinished
from luyen.checkpoint.tensors import save_state


@final
class BackgroundTask:
    """Runs one function at a time in a thread; `wait` raises what it raised.

    Example:
        >>> said: list[str] = []
        >>> background = BackgroundTask()
        >>> background.begin(lambda: said.append("done"))
        >>> background.wait()
        >>> said, background.is_busy()
        (['done'], False)
    """

    def __init__(self, *, ends_with_process: bool = False) -> None:
        """A process that ends finishes the work first, unless `ends_with_process`."""
        self._ends_with_process = ends_with_process
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Start the work, and return; the work before must have been waited for."""
        assert self._thread is None, "the work before was not waited for"
        self._thread = threading.Thread(
            target=self._carry_out,
            args=(work,),
            name="checkpoint",
            daemon=self._ends_with_process,
        )
        self._thread.start()

    def is_busy(self) -> bool:
        """Whether the work is still running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when the work is over; raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _carry_out(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._failure = error


class WritersGone(Exception):
    """The writer processes are gone; the cause was already reported."""


@final
class RemoteCheckpoint:
    """A folder that other processes fill, until all of them have, or one has failed."""

    def __init__(
        self,
        step: int,
        unfinished: Unfinished,
        is_written: Callable[[], bool],
        facts: Mapping[str, Any],
    ) -> None:
        """`is_written` polls all of them; it raises what stopped one."""
        self.step = step
        self._unfinished = unfinished
        self._is_written = is_written
        self._facts = dict(facts)

    def is_written(self) -> bool:
        """Whether all have written. What stopped one is raised, and the folder is removed."""
        with ExitStack() as failed:
            failed.callback(self._unfinished.abandon)
            answer = self._is_written()
            failed.pop_all()
        return answer

    def publish(self) -> None:
        """Write the manifest and rename the folder: the checkpoint appears complete."""
        self._unfinished.finish(self._facts)


_LOOK_S = 0.05


@final
class CheckpointWriter:
    """Saves into a store, one checkpoint at a time.

    In the background, `save` returns as soon as the state is copied: the caller may change it.
    What goes wrong afterwards is raised by the next call of any method, once.
    """

    def __init__(self, store: CheckpointStore, *, is_async: bool = False) -> None:
        self.store = store
        self.is_async = is_async
        self._staging = Staging()
        self._background = BackgroundTask()
        self._finished: list[int] = []
        self._remote: RemoteCheckpoint | None = None

    def save(self, step: int, parts: Mapping[str, Any], *, facts: Mapping[str, Any]) -> None:
        """Make the checkpoint of a step from states by name; the one before is waited for."""
        self.wait()
        if not self.is_async:
            self._write(step, parts, facts)
            return
        copied = self._staging.copy(parts)
        self._background.begin(partial(self._write, step, copied, dict(facts)))

    def save_now(
        self, step: int, fill: Callable[[Path], None], *, facts: Mapping[str, Any]
    ) -> None:
        """Make the checkpoint of a step in this thread; `fill` writes all of it into a folder."""
        self.wait()
        self.store.save(step, fill, facts=facts)
        self._finished.append(step)

    def save_remote(
        self,
        step: int,
        begin: Callable[[Path], None],
        is_written: Callable[[], bool],
        *,
        facts: Mapping[str, Any],
    ) -> None:
        """Make the checkpoint of a step that other processes write.

        `begin` tells them the folder, and returns once the state may change. `is_written` says
        whether all have written, or raises what stopped one; `finished` and `wait` call it, on
        their callers' thread. Only then is the checkpoint published, in a thread. If `is_written`
        raises `WritersGone`, the checkpoint is skipped silently.
        """
        self.wait()
        unfinished = self.store.begin(step)
        with unfinished.filling():
            begin(unfinished.folder)
        self._remote = RemoteCheckpoint(step, unfinished, is_written, facts)

    def finished(self) -> list[int]:
        """Steps whose checkpoints came to be since the last call; raises what stopped one."""
        if not self._take_over():
            return []
        if self._background.is_busy():
            return []
        self.wait()
        done, self._finished = self._finished, []
        return done

    def wait(self) -> None:
        """Return when nothing is being written; raises what stopped the last save."""
        while not self._take_over():
            time.sleep(_LOOK_S)
        self._background.wait()

    def _take_over(self) -> bool:
        """Publish what other processes have written; whether none of them is still writing."""
        found, self._remote = self._remote, None
        if found is None:
            return True
        try:
            is_written = found.is_written()
        except WritersGone:
            return True
        if is_written:
            self._background.begin(partial(self._publish, found))
        else:
            self._remote = found
        return is_written

    def _publish(self, found: RemoteCheckpoint) -> None:
        found.publish()
        self._finished.append(found.step)

    def _write(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        def fill(folder: Path) -> None:
            for name, part in parts.items():
                save_state(folder, name, part)

        self.store.save(step, fill, facts=facts)
        self._finished.append(step)


# One rank's part of a checkpoint, written by a thread of the rank while it goes on training.
#
# What ranks must agree on (who writes which part, and the index of all) is decided while the
# state is copied, on the training thread. The writer thread runs no collectives: they would mix
# with those of training.


@final
class RankWriter:
    """Writes one state after the other; `begin` requires that the previous one `is_done`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> writer = RankWriter()
        >>> folder = Path(tempfile.mkdtemp())
        >>> writer.begin(folder, lambda writes: writes.text(folder / "note", "kept"))
        >>> while not writer.is_done():
        ...     pass
        >>> (folder / "note").read_text()
        'kept'
    """

    def __init__(self) -> None:
        self._deferred = DeferredWriter()
        # A process that is ended takes it along: what it wrote alone is no checkpoint.
        self._background = BackgroundTask(ends_with_process=True)

    def begin(self, folder: Path, fill: Callable[[FileWriter], None]) -> None:
        """Copy what `fill` gives, and return: it may be changed while it is written.

        `folder` is named where the disk refuses.
        """
        assert self.is_done(), "the state before is still being written"
        self._deferred.forget()
        fill(self._deferred)
        self._background.begin(partial(self._write, folder))

    def is_done(self) -> bool:
        """Whether everything is written; raises what stopped it, once."""
        if self._background.is_busy():
            return False
        self._background.wait()
        return True

    def _write(self, folder: Path) -> None:
        with writing(folder, field="checkpoint"):
            self._deferred.write()
