"""Work in a thread of its own, whose failure is raised where somebody asks for it."""

import threading
from collections.abc import Callable
from typing import final


@final
class Aside:
    """One piece of work at a time.

    Example:
        >>> said: list[str] = []
        >>> aside = Aside()
        >>> aside.begin(lambda: said.append("done"))
        >>> aside.wait()
        >>> said, aside.is_busy()
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
        """Whether the work goes on."""
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
