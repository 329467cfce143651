"""A checkpoint that other processes write."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, final

from luyen.checkpoint.store import Unfinished


class WritersGone(Exception):
    """Those who were to write a checkpoint are no more, and somebody else has said why."""


@final
class Elsewhere:
    """A folder that other processes fill, until all of them have, or one has failed."""

    def __init__(
        self,
        step: int,
        unfinished: Unfinished,
        is_written: Callable[[], bool],
        facts: Mapping[str, Any],
    ) -> None:
        """`is_written` asks all of them; it raises what stopped one."""
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

    def seal(self) -> None:
        """Let the checkpoint appear whole."""
        self._unfinished.finish(self._facts)
