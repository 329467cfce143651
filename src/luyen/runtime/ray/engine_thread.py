"""An engine on a thread of its own: whoever asks it something waits, nobody stops it."""

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.foreign import boundary
from luyen.rollout.protocol import Completion, RolloutEngine
from luyen.runtime.ray.wire import RemoteError
from luyen.telemetry.own_work import WORK


@final
class EngineThread:
    """Makes an engine, lets it work while there is work, and does things to it between passes.

    Everything that touches the engine happens on the thread, so no engine need know of threads.
    """

    def __init__(
        self, make: Callable[[], RolloutEngine], *, name: str, changed: Callable[[], object]
    ) -> None:
        """`changed` is called on the thread when there is something new to say."""
        self._make = make
        self._name = name
        self._changed = changed
        self._asked: queue.SimpleQueue[tuple[Callable[[RolloutEngine], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self.finished: list[Completion] = []
        """Every answer that was not dropped, in order; it only grows at its end here."""
        self.passes = 0
        """Passes so far."""
        self.failure: Exception | None = None
        """What the engine broke with, or refused first."""
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def ask(self, work: Callable[[RolloutEngine], Any]) -> Future[Any]:
        """Do something to the engine, between two passes and after what was asked before."""
        future: Future[Any] = Future()
        self._asked.put((work, future))
        return future

    def _work(self) -> None:
        faults: list[BaseException] = []
        with boundary(faults):
            engine = self._make()
            while True:
                self._do_what_is_asked(engine)
                self._advance(engine)
        self.failure = self.failure or self.as_error(faults[0])
        self._changed()
        while True:
            _, future = self._asked.get()
            future.set_exception(self.failure)

    def _do_what_is_asked(self, engine: RolloutEngine) -> None:
        """All that is asked by now; an idle engine waits for something."""
        must_wait = engine.is_idle
        while must_wait or not self._asked.empty():
            work, future = self._asked.get()
            faults: list[BaseException] = []
            with boundary(faults):
                future.set_result(work(engine))
            if faults:
                future.set_exception(self.as_error(faults[0]))
            must_wait = False

    def _advance(self, engine: RolloutEngine) -> None:
        if engine.is_idle:
            WORK.end_stretch()
            return
        WORK.begin_pass()
        done = engine.advance()
        WORK.end_pass(answers=len(done), is_idle=engine.is_idle)
        self.passes += 1
        if done:
            self.finished += done
            self._changed()

    def as_error(self, fault: BaseException) -> Exception:
        """A fault as it can be sent: what the user can mend stays what it is."""
        text = "".join(traceback.format_exception(fault)).rstrip()
        if isinstance(fault, UserError):
            fault.add_note(f"In {self._name}:\n{text}")
            return fault
        return fault if isinstance(fault, RemoteError) else RemoteError(self._name, text)
