"""Checkpoints written in this thread, or in one of their own while training goes on."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from luyen.checkpoint.staging import Staging
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import save_state


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
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._finished: list[int] = []

    def save(self, step: int, parts: Mapping[str, Any], *, facts: Mapping[str, Any]) -> None:
        """Make the checkpoint of a step from states by name; the one before is waited for."""
        self.wait()
        if not self.is_async:
            self._write(step, parts, facts)
            return
        copied = self._staging.copy(parts)
        # Not a daemon: a process that ends finishes its checkpoint first.
        self._thread = threading.Thread(
            target=self._write_aside, args=(step, copied, dict(facts)), name="checkpoint"
        )
        self._thread.start()

    def save_now(
        self, step: int, fill: Callable[[Path], None], *, facts: Mapping[str, Any]
    ) -> None:
        """Make the checkpoint of a step in this thread; `fill` writes all of it into a folder."""
        self.wait()
        self.store.save(step, fill, facts=facts)
        self._finished.append(step)

    def finished(self) -> list[int]:
        """Steps whose checkpoints came to be since the last call; raises what stopped one."""
        if self._thread is not None and self._thread.is_alive():
            return []
        self.wait()
        done, self._finished = self._finished, []
        return done

    def wait(self) -> None:
        """Return when nothing is being written; raises what stopped the last save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write_aside(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        try:
            self._write(step, parts, facts)
        except BaseException as error:  # noqa: BLE001 - raised again where the run can stop
            self._failure = error

    def _write(self, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        def fill(folder: Path) -> None:
            for name, part in parts.items():
                save_state(folder, name, part)

        self.store.save(step, fill, facts=facts)
        self._finished.append(step)
