"""A sink that may fail or be slow, kept away from training.

A thread of its own makes the sink and carries out every call, so a network that hangs never holds a
step up. Whatever goes wrong is told once, as a warning, and the run goes on.
"""

import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, final


class Sink(Protocol):
    """Where metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what a step measured; called once a step, with steps that rise."""
        ...

    def artifact(self, path: Path) -> None:
        """Keep a finished file of the run, where files are kept elsewhere than in its folder."""
        ...

    def close(self) -> None:
        """Finish; nothing more will come."""
        ...


class SinkFailure(UserWarning):
    """A sink could not keep something; the run goes on without it."""


@final
class BackgroundSink:
    """Calls another sink from a thread; failures become one warning."""

    def __init__(
        self, name: str, make: Callable[[], Sink], *, capacity: int = 1000, patience_s: float = 30.0
    ) -> None:
        """`capacity` calls may wait; `close` waits at most `patience_s` for them."""
        self._name = name
        self._patience_s = patience_s
        self._calls: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(capacity)
        self._failure: str | None = None
        self._told = False
        self._thread = threading.Thread(
            target=self._work, args=(make,), name=f"sink-{name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics over."""
        kept = dict(metrics)
        self._hand_over(lambda sink: sink.write(step, kept))

    def artifact(self, path: Path) -> None:
        """Hand the file over."""
        self._hand_over(lambda sink: sink.artifact(path))

    def close(self) -> None:
        """Wait for what was handed over, as long as patience lasts."""
        deadline = time.monotonic() + self._patience_s
        try:
            self._calls.put(None, timeout=self._patience_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            self._failure = self._failure or "it does not answer"
        if self._thread.is_alive():
            self._failure = self._failure or f"it did not finish within {self._patience_s:g} s"
        self._tell()

    def _hand_over(self, call: Callable[[Sink], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failure = self._failure or "it is too slow: calls were dropped"
        self._tell()

    def _tell(self) -> None:
        """Warn in the thread of the run, where a person or a test will see it."""
        if self._failure is not None and not self._told:
            self._told = True
            said = f"sink {self._name}: {self._failure}; training goes on without it"
            warnings.warn(said, SinkFailure, stacklevel=4)

    def _work(self, make: Callable[[], Sink]) -> None:
        sink: Sink | None = None
        try:
            sink = make()
        except Exception as error:  # noqa: BLE001 - whatever a remote service raises
            self._failure = f"{type(error).__name__}: {error}"
        while (call := self._calls.get()) is not None:
            self._carry_out(call, sink)
        self._carry_out(lambda made: made.close(), sink)

    def _carry_out(self, call: Callable[[Sink], None], sink: Sink | None) -> None:
        try:
            if sink is not None:
                call(sink)
        except Exception as error:  # noqa: BLE001 - whatever a remote service raises
            self._failure = self._failure or f"{type(error).__name__}: {error}"
