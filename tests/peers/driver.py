"""One embedded engine behind a server: a thread runs it, and handlers of requests wait for it.

The servers of this folder differ in routes, names and conventions, and share this. All access to
the engine happens on its thread, between two passes, so that weights never change inside a pass.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.models.packed_attention import PackedContext, packed_positions
from luyen.models.policy import Policy
from luyen.models.weights import tensor_digests
from luyen.rollout.client import PartialCompletion
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.native.sequences import Decode
from luyen.rollout.protocol import Completion, Ending, Request, Sampling

T = TypeVar("T")
Convention = Literal["full", "raw", "barred", "kept"]
"""What a log-probability is of. full: softmax(logits / temperature). raw: softmax(logits).
barred: full, without stop tokens before the least length. kept: full, renormalised over the tokens
that min-p, top-k, top-p and the least length leave."""
Pause = Literal["abort", "wait", "recompute", "freeze"]
"""What a pause does to running samples: end them; let them end; compute their cache again with the
weights of the continuation; keep their cache, whatever weights come."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished sample."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    """By the convention of its request."""
    reason: Ending
    version: str
    """Version of the weights at its end."""


@final
class _Job:
    """A sample that is wanted."""

    def __init__(
        self, rid: str, prompt: tuple[int, ...], key: int, sampling: Sampling, rule: Convention
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.sampling = sampling
        self.rule: Convention = rule
        self.partial = PartialCompletion(key, sampling)
        self.scores: tuple[float, ...] = ()
        self.future: Future[Sample] = Future()

    def request(self, name: str) -> Request:
        """What is left to generate."""
        return Request(
            id=name,
            tokens=self.prompt + self.partial.tokens,
            keys=(self.partial.key,),
            sampling=self.partial.sampling,
        )


@final
class WeightsRefused(Exception):
    """Weights that do not fit the model."""


def _make_engine(policy: Policy, decode: Decode, rows: int, longest: int) -> NativeEngine:
    return NativeEngine(
        policy,
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=max(longest, 8192),
        decode=decode,
    )


@final
class EngineDriver:
    """Runs an engine on a thread of its own."""

    def __init__(
        self,
        policy: Policy,
        *,
        decode: Decode,
        folder: str = "",
        eos_ids: frozenset[int] = frozenset(),
        rows: int = 64,
        longest: int = 2048,
    ) -> None:
        self.policy = policy
        self.decode = decode
        self.folder = folder
        """Where the model was loaded from."""
        self.eos_ids = eos_ids
        """Tokens that end a text by the model's own files."""
        self.longest = longest
        self.version = "default"
        self.is_paused = False
        self.is_frozen = False
        """Whether the pause keeps the caches of running samples."""
        self.passes = 0
        """Passes of the engine so far."""
        self.requests = 0
        """Samples that were ever submitted."""
        self.pause_s = 0.0
        """Seconds between two passes: makes generation long enough to be interrupted."""
        self._engine = _make_engine(policy, decode, rows, longest)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._commands = queue.SimpleQueue()
        self._running: dict[str, _Job] = {}
        self._waiting: list[_Job] = []
        self._exclusive: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._is_closed = False
        self._sleep = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="peer engine", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether samples wait or run."""
        return bool(self._running or self._waiting)

    def generate(
        self,
        prompt: tuple[int, ...],
        keys: Iterable[int],
        sampling: Sampling,
        *,
        rid: str,
        rule: Convention = "full",
    ) -> list[Sample]:
        """The samples of a prompt, in the order of their keys; blocks until all have ended."""
        jobs = [_Job(rid, prompt, key, sampling, rule) for key in keys]
        self._call(lambda: self._waiting.extend(jobs))
        return [job.future.result() for job in jobs]

    def abort(self, matches: Callable[[str], bool]) -> int:
        """End the samples of these requests; how many there were."""
        return self._call(lambda: self._abort(matches))

    def pause(self, mode: Pause) -> None:
        """Stop generation until `resume`; new requests wait."""

        def stop() -> None:
            self.is_paused = True
            self.is_frozen = mode == "freeze" and bool(self._running)
            if mode == "abort":
                self._abort(lambda _: True)
            elif mode == "recompute":
                self._requeue()

        self._call(stop, is_exclusive=mode == "wait")

    def resume(self) -> None:
        """Go on."""

        def go_on() -> None:
            self.is_paused = self.is_frozen = False

        self._call(go_on)

    def load(
        self, weights: Mapping[str, Tensor], version: str | None = None, *, drains: bool = False
    ) -> None:
        """Write weights into the model; with `drains`, after the running samples have ended."""
        self._call(lambda: self._load(weights, version), is_exclusive=drains)

    def set_version(self, version: str) -> None:
        """Another name of the weights."""
        self.version = version

    def checksums(self) -> dict[str, str]:
        """Digest of each parameter."""
        return self._call(lambda: tensor_digests(dict(self.policy.model.named_parameters())))

    def close(self) -> None:
        """Stop the thread; whatever still waits gets an error."""
        self._is_closed = True
        self._sleep.set()
        self._commands.put(None)
        self._thread.join()

    def _call(self, command: Callable[[], T], *, is_exclusive: bool = False) -> T:
        done: Future[T] = Future()
        if is_exclusive:
            self._commands.put((lambda: self._exclusive.append((command, done)), Future()))
        else:
            self._commands.put((command, done))
        return done.result()

    def _loop(self) -> None:
        while not self._is_closed:
            self._take_commands()
            if self._exclusive and (self.is_paused or not self._running):
                _run(*self._exclusive.pop(0))
                continue
            if not self.is_paused:
                self._advance()
        for job in (*self._running.values(), *self._waiting):
            job.future.set_exception(ConnectionError("the server is closed"))

    def _take_commands(self) -> None:
        """Run every command that is there; wait for one where there is nothing else to do."""
        can_start = bool(self._waiting) and not self._exclusive
        has_work = bool(self._running) or can_start or bool(self._exclusive)
        is_idle = not has_work or (self.is_paused and not self._exclusive)
        while True:
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return
            if command is None:
                return
            _run(*command)
            is_idle = False

    def _advance(self) -> None:
        if not self._exclusive:
            for job in self._waiting:
                self._submit(job)
            self._waiting = []
        if self.pause_s:
            self._sleep.wait(self.pause_s)
        if not self._engine.is_idle:
            self.passes += 1
            for completion in self._engine.advance():
                self._finish(self._running.pop(completion.request), completion)

    def _submit(self, job: _Job) -> None:
        self.requests += 1
        name = f"{self.requests}"
        try:
            self._engine.submit(job.request(name))
        except UserError as refusal:
            job.future.set_exception(refusal)
        else:
            self._running[name] = job

    def _finish(self, job: _Job, last: Completion) -> None:
        scores = job.scores + self._score(job, last)
        whole = job.partial.finish(last, 0)
        job.future.set_result(
            Sample(tokens=whole.tokens, logps=scores, reason=last.reason, version=self.version)
        )

    def _abort(self, matches: Callable[[str], bool]) -> int:
        dropped = [job for job in self._waiting if matches(job.rid)]
        self._waiting = [job for job in self._waiting if not matches(job.rid)]
        for job in dropped:
            empty = Completion(request="", sample=0, tokens=(), logps=(), reason="aborted")
            self._finish(job, empty)
        names = [name for name, job in self._running.items() if matches(job.rid)]
        for name in names:
            job = self._running.pop(name)
            for completion in self._engine.abort(name):
                self._finish(job, completion)
        return len(dropped) + len(names)

    def _requeue(self) -> None:
        """Take running samples out of the engine; what they have is prefilled again later."""
        for name, job in self._running.items():
            for stopped in self._engine.abort(name):
                scores = self._score(job, stopped)
                job.partial.continue_after(stopped, 0)
                job.scores = job.scores + scores if job.partial.tokens else ()
        self._waiting = [*self._running.values(), *self._waiting]
        self._running = {}

    @torch.no_grad()
    def _score(self, job: _Job, part: Completion) -> tuple[float, ...]:
        """Log-probabilities of a part by the convention of its request, with these weights."""
        masses = part.kept_mass or (1.0,) * len(part.tokens)
        if job.rule == "full" or not part.tokens:
            return part.logps
        if job.rule == "kept":
            kept = torch.tensor(masses, dtype=torch.float64).log()
            return tuple((torch.tensor(part.logps, dtype=torch.float64) - kept).tolist())
        before = job.prompt + job.partial.tokens
        sequence = torch.tensor(before + part.tokens)
        count = len(sequence) - 1
        positions = packed_positions([count], "cpu")
        hidden = self.policy.hidden(sequence[:-1], positions, PackedContext.of([count]))
        logits = self.policy.head.logits(hidden[len(before) - 1 :], temperature=1.0).double()
        if job.rule == "barred":
            logits = logits / (job.sampling.temperature or 1.0)
            first = job.sampling.min_new_tokens - len(job.partial.tokens)
            logits[: max(0, first), sorted(job.sampling.barred_ids)] = -torch.inf
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(part.tokens)[:, None])
        return tuple(logps[:, 0].tolist())

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor], version: str | None) -> None:
        own = dict(self.policy.model.named_parameters())
        for name, tensor in weights.items():
            if name not in own:
                if name == "lm_head.weight":  # tied to the embedding
                    continue
                raise WeightsRefused(f"the model has no parameter {name}")
            if own[name].shape != tensor.shape:
                raise WeightsRefused(f"{name} has the shape {list(tensor.shape)}")
        for name, tensor in weights.items():
            if name in own:
                own[name].copy_(tensor)
        if version is not None:
            self.version = version


def _run(command: Callable[[], Any], done: Future[Any]) -> None:
    faults: list[BaseException] = []
    with boundary(faults):
        done.set_result(command())
        return
    done.set_exception(faults[0])


def read_folder(folder: str) -> dict[str, Tensor]:
    """Every tensor of a model's folder; WeightsRefused where there is none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightsRefused(f"no safetensors in {folder}")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}
