"""The one thread that owns policy and engine: requests in by a queue, events out by callbacks.

Passes of the engine block, so they do not run on the event loop. Nothing else touches the engine:
whatever needs the policy (scores of prompts, new weights) is done here, between two passes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast, final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError
from luyen.rollout.protocol import (
    Completion,
    PrefixCaching,
    Request,
    RolloutEngine,
    StreamingEngine,
    TokenStream,
    TopLogps,
)
from luyen.serve.failures import ApiFailure, engine_failure, refused, stopping
from luyen.serve.model import ServedModel

T = TypeVar("T")
_LOG = logging.getLogger("luyen.serve")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A sample is complete.

    Example:
        >>> done = Completion(request="a/0", sample=0, tokens=(5,), logps=(-0.1,), reason="stop")
        >>> Finished(completion=done, digest="fp_1").completion.sample
        0
    """

    completion: Completion
    """The sample."""
    digest: str
    """Digest of the weights that generated it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleProgress:
    """New tokens of a sample that is still being generated.

    Example:
        >>> SampleProgress(request="a/0", sample=0, tokens=(5,), logps=(-0.1,), digest="f").tokens
        (5,)
    """

    request: str
    """Id of its request."""
    sample: int
    """Its index there."""
    tokens: tuple[int, ...]
    """Tokens since the last event."""
    logps: tuple[float, ...]
    """Log-probability of each."""
    digest: str
    """Digest of the weights that generate it."""
    top_logps: tuple[TopLogps, ...] = ()
    """(id, log-probability) of the likeliest at each; empty where they were not wanted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request is over without an answer.

    Example:
        >>> Refused(failure=engine_failure()).failure.status
        500
    """

    failure: ApiFailure
    """What the client is answered."""


EngineEvent: TypeAlias = Finished | SampleProgress | Refused
Listener: TypeAlias = Callable[[Sequence[EngineEvent]], None]
"""Called on the engine thread; it must return at once."""


@final
class _Submission:
    """A request in the engine or on its way there."""

    __slots__ = ("is_streaming", "listener", "open", "request")

    def __init__(self, request: Request, listener: Listener, is_streaming: bool) -> None:
        self.request = request
        self.listener = listener
        self.is_streaming = is_streaming
        self.open = dict.fromkeys(range(len(request.keys)), 0)
        """Samples that are still to come, with the number of tokens that were reported."""


@final
class ServingThread:
    """Continuous batching for clients of other threads."""

    def __init__(self, model: ServedModel, build: Callable[[ServedModel], RolloutEngine]) -> None:
        """`build` makes the engine; it is called on the thread, and again for new weights."""
        self._build = build
        self._model = model
        self._engine: RolloutEngine | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[str, _Submission] = {}
        self._waiting: list[_Submission] = []
        """Requests that came while the engine drains for new weights."""
        self._next: tuple[ServedModel, Future[None]] | None = None
        self._is_stopping = False
        self._is_over = False
        """Whether the thread no longer reads commands."""
        self._thread = threading.Thread(target=self._run, name="rollout engine", daemon=True)

    @property
    def model(self) -> ServedModel:
        """The model that new requests are answered by."""
        return self._model

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def cache_counts(self) -> Mapping[str, int]:
        """Counters of the engine's prefix cache; empty for an engine without one."""
        engine = self._engine
        return asdict(engine.cache_stats()) if isinstance(engine, PrefixCaching) else {}

    def start(self) -> None:
        """Start the thread; returns once the engine is there, or raises why it is not."""
        ready: Future[None] = Future()

        def begin() -> None:
            self._engine = self._build(self._model)

        self._commands.put(lambda: _carry_out(begin, ready))
        self._thread.start()
        ready.result()

    def submit(self, requests: Sequence[Request], listener: Listener, *, streams: bool) -> None:
        """Queue requests; `listener` gets their events, tokens in progress too if it `streams`."""
        found = [_Submission(request, listener, streams) for request in requests]
        self._order(lambda: self._take(found))

    def abort(self, ids: Sequence[str]) -> None:
        """Stop requests; their listeners hear nothing more."""
        self._order(lambda: self._abort(ids))

    def call(self, task: Callable[[ServedModel], T]) -> "Future[T]":
        """Run something that needs the policy between two passes."""
        future: Future[T] = Future()

        def run() -> T:
            if self._is_stopping:
                raise stopping()
            return task(self._model)

        self._order(lambda: _carry_out(run, future))
        return future

    def swap(self, model: ServedModel) -> "Future[None]":
        """Finish what runs, then serve this model; requests that arrive until then wait."""
        future: Future[None] = Future()
        self._order(lambda: self._prepare_swap(model, future))
        return future

    def stop(self) -> None:
        """End the thread; what is open is refused."""
        if self._thread.is_alive():
            self._commands.put(self._end)
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            faults: list[BaseException] = []
            with boundary(faults):
                self._obey()
                self._pass()
            if faults:
                self._recover(faults[0])
        self._is_over = True
        self._refuse_commands()

    def _order(self, command: Callable[[], None]) -> None:
        """Queue a command; after the end it is refused at once."""
        self._commands.put(command)
        # The flag is set before the thread reads the queue for the last time, so no command is
        # left there: either that reading finds it, or this one does.
        if self._is_over:
            self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Carry out what is queued after the end: every command refuses what it was given."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _obey(self) -> None:
        """Carry out what was queued; wait for it where there is nothing else to do."""
        if self._is_idle:
            self._commands.get()()
        while not self._is_stopping:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    @property
    def _is_idle(self) -> bool:
        return self._next is None and (self._engine is None or self._engine.is_idle)

    def _pass(self) -> None:
        if self._engine is None or self._is_stopping:
            return
        if not self._engine.is_idle:
            for completion in self._engine.advance():
                self._deliver(completion)
            self._report_progress(self._engine)
        if self._next is not None and self._engine.is_idle:
            self._swap_now(*self._next)

    def _take(self, submissions: Sequence[_Submission]) -> None:
        if self._is_stopping:
            for submission in submissions:
                submission.listener([Refused(failure=stopping())])
            return
        if self._next is not None:
            self._waiting += submissions
            return
        assert self._engine is not None, "it was started"
        for submission in submissions:
            try:
                self._engine.submit(submission.request)
            except UserError as error:
                _LOG.warning("request refused by the engine: %s", error)
                submission.listener([Refused(failure=refused(error))])
                continue
            self._open[submission.request.id] = submission

    def _deliver(self, completion: Completion) -> None:
        submission = self._open.get(completion.request)
        if submission is None:
            return
        submission.open.pop(completion.sample, None)
        if not submission.open:
            del self._open[completion.request]
        submission.listener([Finished(completion=completion, digest=self._model.digest)])

    def _report_progress(self, engine: RolloutEngine) -> None:
        """New tokens of running samples, to listeners that stream; other engines have none."""
        if not isinstance(engine, StreamingEngine):
            return
        for submission in self._open.values():
            if not submission.is_streaming:
                continue
            events: list[EngineEvent] = []
            for sample, count in submission.open.items():
                found = engine.snapshot(submission.request.id, sample, start=count)
                if found is not None and found.tokens:
                    events.append(_progress(submission.request.id, sample, found, self._model))
                    submission.open[sample] = count + len(found.tokens)
            if events:
                submission.listener(events)

    def _abort(self, ids: Sequence[str]) -> None:
        self._waiting = [one for one in self._waiting if one.request.id not in ids]
        for name in ids:
            if self._open.pop(name, None) is not None and self._engine is not None:
                # An engine with rounds in flight may finish other requests while it aborts one.
                for completion in self._engine.abort(name):
                    self._deliver(completion)

    def _prepare_swap(self, model: ServedModel, future: "Future[None]") -> None:
        if self._is_stopping:
            _fail(future, stopping())
            return
        if self._next is not None:
            why = "other weights are on their way into the server"
            _fail(future, ApiFailure(409, why, param="path", code="swap_in_progress"))
            return
        self._next = (model, future)

    def _swap_now(self, model: ServedModel, future: "Future[None]") -> None:
        """Replace the engine, whose caches belong to the old weights."""
        assert self._engine is not None
        self._next = None

        def replace() -> None:
            assert self._engine is not None
            self._engine.close()
            self._engine, self._model = self._build(model), model

        _carry_out(replace, future)
        waiting, self._waiting = self._waiting, []
        self._take(waiting)

    def _recover(self, fault: BaseException) -> None:
        """Fail what is open and begin again with a new engine: one bad request ends no server."""
        _LOG.error("the engine failed: %s", last_line(fault), exc_info=fault)
        self._refuse_open(engine_failure())
        if self._engine is not None:
            faults: list[BaseException] = []
            with boundary(faults):
                self._engine.close()
                self._engine = self._build(self._model)
            if faults:
                _LOG.critical("the engine cannot be built again", exc_info=faults[0])
                self._end()

    def _refuse_open(self, failure: ApiFailure) -> None:
        for submission in (*self._open.values(), *self._waiting):
            submission.listener([Refused(failure=failure)])
        self._open.clear()
        self._waiting = []

    def _end(self) -> None:
        self._is_stopping = True
        self._refuse_open(stopping())
        if self._next is not None:
            _fail(self._next[1], stopping())
        if self._engine is not None:
            self._engine.close()


def _progress(request: str, sample: int, found: TokenStream, model: ServedModel) -> SampleProgress:
    return SampleProgress(
        request=request,
        sample=sample,
        tokens=found.tokens,
        logps=found.logps,
        top_logps=found.top_logps,
        digest=model.digest,
    )


def _carry_out(task: Callable[[], T], future: "Future[T]") -> None:
    """Run a task; its result or its exception goes to the future.

    A task whose client went away is not run: its future was cancelled, and takes no result.
    """
    if not future.set_running_or_notify_cancel():
        return
    faults: list[BaseException] = []
    result: Any = None
    with boundary(faults):
        result = task()
    if faults:
        future.set_exception(faults[0])
    else:
        future.set_result(cast(T, result))


def _fail(future: "Future[Any]", failure: ApiFailure) -> None:
    """Answer a future that waits, unless its client went away."""
    if future.set_running_or_notify_cancel():
        future.set_exception(failure)
