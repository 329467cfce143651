"""Checkpoints written in this thread, or in one of their own while training goes on."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from luyen.checkpoint.aside import Aside
from luyen.checkpoint.elsewhere import Elsewhere, WritersGone
from luyen.checkpoint.staging import Staging
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import save_state

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
        self._aside = Aside()
        self._finished: list[int] = []
        self._elsewhere: Elsewhere | None = None

    def save(self, step: int, parts: Mapping[str, Any], *, facts: Mapping[str, Any]) -> None:
        """Make the checkpoint of a step from states by name; the one before is waited for."""
        self.wait()
        if not self.is_async:
            self._write(step, parts, facts)
            return
        copied = self._staging.copy(parts)
        self._aside.begin(partial(self._write, step, copied, dict(facts)))

    def save_now(
        self, step: int, fill: Callable[[Path], None], *, facts: Mapping[str, Any]
    ) -> None:
        """Make the checkpoint of a step in this thread; `fill` writes all of it into a folder."""
        self.wait()
        self.store.save(step, fill, facts=facts)
        self._finished.append(step)

    def save_elsewhere(
        self,
        step: int,
        begin: Callable[[Path], None],
        is_written: Callable[[], bool],
        *,
        facts: Mapping[str, Any],
    ) -> None:
        """Make the checkpoint of a step that other processes write.

        `begin` tells them the folder, and returns once the state may change. `is_written` says
        whether all have written, or raises what stopped one; it is asked by `finished` and by
        `wait`, on their callers' thread. Only then is the checkpoint sealed, in a thread. A
        `WritersGone` of `is_written` leaves it out without a word.
        """
        self.wait()
        unfinished = self.store.begin(step)
        with unfinished.filling():
            begin(unfinished.folder)
        self._elsewhere = Elsewhere(step, unfinished, is_written, facts)

    def finished(self) -> list[int]:
        """Steps whose checkpoints came to be since the last call; raises what stopped one."""
        if not self._take_over():
            return []
        if self._aside.is_busy():
            return []
        self.wait()
        done, self._finished = self._finished, []
        return done

    def wait(self) -> None:
        """Return when nothing is being written; raises what stopped the last save."""
        while not self._take_over():
            time.sleep(_LOOK_S)
        self._aside.wait()

    def _take_over(self) -> bool:
        """Seal what other processes have written; whether there is nothing to wait for of them."""
        found, self._elsewhere = self._elsewhere, None
        if found is None:
            return True
        try:
            is_written = found.is_written()
        except WritersGone:
            return True
        if is_written:
            self._aside.begin(partial(self._seal, found))
        else:
            self._elsewhere = found
        return is_written

    def _seal(self, found: Elsewhere) -> None:
        found.seal()
        self._finished.append(found.step)

    def _write(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        def fill(folder: Path) -> None:
            for name, part in parts.items():
                save_state(folder, name, part)

        self.store.save(step, fill, facts=facts)
        self._finished.append(step)
