"""A rollout engine over one server: one HTTP request per sample, validated and recovered.

A server may be killed, hang, answer with an error, cut a connection, or reply with what was not
asked for. Each is recovered a bounded number of times, by the same request with the same seed; then
the run ends with the first cause. A server answers no request before it has proved its weights.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.export import checkpoint_tensors
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint, tensor_digests, trained_parameters
from luyen.rollout.native.sequences import Decode, Row
from luyen.rollout.protocol import (
    Completion,
    Request,
    completion_fault,
    refuse_impossible,
    refuse_options,
)
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import Generated, ServerDialect, ServerFault, read_reply
from luyen.rollout.servers.process import Server
from luyen.rollout.servers.weights import (
    WeightProof,
    WeightTransport,
    refuse_other_tensors,
    refuse_other_version,
)

_FIELD = "actor_rollout_ref.rollout.name"
_WAIT_S = 0.02
"""Longest wait of `advance` for a reply; coroutines of conversations run between two calls."""
_ABORT_S = 10.0
"""Longest wait for the partial replies of aborted requests."""
_BACKOFF_S = 0.2
_CLAMP = -9000.0
"""Servers send -infinity as -9999: a token without probability cannot have been sampled."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of an engine over a server.

    Example:
        >>> ServerLimits(max_model_len=64, max_num_seqs=8).retries
        3
    """

    max_model_len: int
    """Most tokens of a sequence."""
    max_num_seqs: int
    """Most requests at once."""
    retries: int = 3
    """How often a request is sent again, and a publication repeated."""


@final
class _Sample:
    """One sample that is wanted of the server."""

    __slots__ = ("faults", "future", "id", "request", "sample")

    def __init__(self, request: Request, sample: int) -> None:
        self.request = request
        self.sample = sample
        self.id = ""
        """Name of its present HTTP request."""
        self.future: Future[Any] | None = None
        self.faults: list[ServerFault] = []

    def matches(self, request: str, sample: int | None) -> bool:
        """Whether it is the sample of the request, or any of them."""
        return self.request.id == request and sample in (None, self.sample)

    def aborted(self) -> Completion:
        """The completion of a sample that was never sent, or whose tokens are lost."""
        return Completion(
            request=self.request.id, sample=self.sample, tokens=(), logps=(), reason="aborted"
        )


@final
class ServerEngine:
    """Generates in a server; its weights are those of `policy` when they were sent last."""

    def __init__(
        self,
        server: Server,
        connection: ServerConnection,
        dialect: ServerDialect,
        transport: WeightTransport | None,
        *,
        policy: Policy,
        decode: Decode | None,
        limits: ServerLimits,
        has_own_weights: bool = False,
        tensors: Callable[[Policy], Mapping[str, Tensor]] = checkpoint_tensors,
    ) -> None:
        """`transport` sends weights to the server: those that `tensors` takes from the policy.

        With `has_own_weights` it samples from a fixed model of its own, takes no weights and proves
        none.
        """
        self._server = server
        self._connection = connection
        self._dialect = dialect
        self._transport = transport
        self._policy = policy
        self._decode = decode
        self._limits = limits
        room = limits.max_model_len
        self._proof = WeightProof(server, connection, dialect, policy=policy, room=room)
        self._has_own_weights = has_own_weights
        self._tensors = tensors
        self._waiting: deque[_Sample] = deque()
        self._running: dict[str, _Sample] = {}
        self._unproved: list[tuple[_Sample, Completion]] = []
        """Completions that are taken once the server has proved its weights after them."""
        self._replies: queue.SimpleQueue[tuple[str, Future[Any]]] = queue.SimpleQueue()
        self._count = 0
        self._model: str | None = None
        self._version: int | None = None
        """Version that was sent last; None: the policy's initial weights."""
        self._digests: Mapping[str, str] | None = None
        """Digests of the trained weights that the server has proved; None: none yet."""
        self._is_asleep = False
        self._is_greeted = False
        """Whether the present server has said what it serves."""
        self._is_suspect = False
        """Whether a fault since the last look may mean that the server is dead."""

    @property
    def name(self) -> str:
        """Kind of its server: `vllm`, `sglang` or `openai`."""
        return self._dialect.name

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not (self._waiting or self._running or self._unproved)

    @property
    def is_batch_invariant(self) -> bool:
        """No: nothing is promised of the server's arithmetic."""
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """Trained parameters of the policy, to write new values into."""
        return trained_parameters(self._policy)

    def fingerprint(self) -> Fingerprint | None:
        """Digests of the weights that the server has proved to hold; None: none yet."""
        return None if self._digests is None else Fingerprint(weights=self._digests)

    # Requests.

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        vocabulary, limit = self._policy.head.vocabulary, self._limits.max_model_len
        refuse_impossible(request, vocabulary=vocabulary, can_decode=self._decode is not None)
        refuse_options(request, self._dialect.name)
        prompt, new = len(request.tokens), request.sampling.max_new_tokens
        if prompt + new > limit:
            why = f"the server takes sequences of at most {limit} tokens (max_model_len)"
            fix = "shorten the prompt, or raise max_model_len"
            raise UserError(f"request {request.id}", f"{prompt} + {new} tokens", why, fix)
        why = self._dialect.refusal(request.sampling)
        if request.sampling.is_truncated:
            why = (
                f"under top-k, top-p, min-p or min_new_tokens `{self._dialect.name}` does not say "
            )
            why += "how much of the full softmax is left"
        if why is not None:
            fix = "sample from the full softmax, or use the engine `native`"
            raise UserError(f"request {request.id}", request.sampling, why, fix)
        self._waiting += [_Sample(request, i) for i in range(len(request.keys))]

    def advance(self) -> list[Completion]:
        """Send what waits; the completions that have arrived, after a short wait for the first.

        They come once the server has proved its weights again: when nothing else runs, and from
        time to time before.
        """
        if self.is_idle:
            return []
        self._make_ready()
        self._send_waiting()
        self._unproved += self._arrived(_WAIT_S)
        return self._proved()

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; its partial completions.

        What else the server finishes in the meantime is among them.
        """
        dropped = [one for one in self._waiting if one.matches(request, sample)]
        self._waiting = deque(one for one in self._waiting if one not in dropped)
        found = [one.aborted() for one in dropped]
        done = [pair for pair in self._unproved if pair[0].matches(request, sample)]
        self._unproved = [pair for pair in self._unproved if pair not in done]
        running = [one for one in self._running.values() if one.matches(request, sample)]
        return found + self._stop(running, done)

    def close(self) -> None:
        """Drop all requests and end the server; the next request starts it again."""
        self._forget()
        self._digests = None
        if self._transport is not None:
            self._transport.close()
        self._server.stop()

    def rest(self) -> None:
        """Let the server give its memory back until the next request."""
        self._forget()
        if self._digests is not None and not self._is_asleep and self._dialect.sleep():
            self._control(self._dialect.sleep())
            self._is_asleep = True

    def _forget(self) -> None:
        """Drop everything that waits or runs."""
        self._waiting.clear()
        for one in self._running.values():
            if one.future is not None:
                one.future.cancel()
        self._running.clear()
        self._unproved.clear()
        self._replies = queue.SimpleQueue()

    def _requeue_running(self) -> None:
        """Queue again what runs or waits for a proof."""
        for one in self._running.values():
            if one.future is not None:
                one.future.cancel()
        done = [one for one, _ in self._unproved]
        self._waiting.extendleft(reversed([*done, *self._running.values()]))
        self._running.clear()
        self._unproved.clear()
        self._replies = queue.SimpleQueue()

    def _send_waiting(self) -> None:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            one = self._waiting.popleft()
            self._count += 1
            one.id = f"luyen-{self._count}"
            call = self._dialect.generate(
                one.id,
                one.request.tokens,
                one.request.sampling,
                seed=one.request.keys[one.sample] >> 2,
                model=self._model,
            )
            delay_s = _BACKOFF_S * 2 ** len(one.faults) if one.faults else 0.0
            one.future = self._connection.start(call, delay_s=delay_s)
            self._running[one.id] = one
            replies, name = self._replies, one.id
            one.future.add_done_callback(lambda f, n=name, r=replies: r.put((n, f)))

    def _arrived(self, wait_s: float) -> list[tuple[_Sample, Completion]]:
        """Completions of the replies so far; faults are queued again, or raised."""
        found: list[tuple[_Sample, Completion]] = []
        while True:
            try:
                name, future = self._replies.get(timeout=0.0 if found else wait_s)
            except queue.Empty:
                return found
            one = self._running.pop(name, None)
            if one is None or future.cancelled():
                continue
            try:
                found.append((one, self._finished(one, future.result())))
            except ServerFault as fault:
                self._retry(one, fault)

    def _proved(self) -> list[Completion]:
        """Completions so far, if a proof of the weights is due and succeeds; else they wait."""
        is_last = not self._running and not self._waiting
        must_prove = self._transport is not None
        if not self._unproved or (must_prove and not is_last and not self._proof.is_due):
            return []
        found, self._unproved = self._unproved, []
        try:
            if must_prove:
                self._proof.require(model=self._model, version=self._version or 0)
        except ServerFault as fault:
            for one, _ in found:
                self._retry(one, fault)
            return []
        return [done for _, done in found]

    def _finished(self, one: _Sample, reply: Any) -> Completion:
        """The completion of a sample that this engine did not abort."""
        done = self._completion(one, reply)
        if done.reason == "aborted":  # half an answer, which must not count as a whole one
            raise ServerFault("reply", "the server aborted the request by itself")
        return done

    def _completion(self, one: _Sample, reply: Any) -> Completion:
        """The validated completion of a reply; a ServerFault if it is not one."""
        made = read_reply(self._dialect.generated, reply)
        if made.model is not None and self._model is not None and made.model != self._model:
            raise ServerFault("reply", f"the model {made.model!r} answered, not {self._model!r}")
        if made.version is not None and self._transport is not None:
            refuse_other_version(made.version, self._version or 0)
        logps = tuple(float("nan") if logp is None else logp for logp in made.logps)
        done = replace(
            one.aborted(),
            tokens=made.tokens,
            logps=logps,
            reason=made.reason,
            versions=() if self._version is None else (self._version,) * len(made.tokens),
        )
        why = completion_fault(done, one.request, vocabulary=self._policy.head.vocabulary)
        if why is None and min(logps, default=0.0) < _CLAMP:
            why = "a sampled token has no probability"
        if why is not None:
            raise ServerFault("reply", why)
        return done if made.reason == "aborted" else self._ended(one, done, made)

    def _ended(self, one: _Sample, done: Completion, made: Generated) -> Completion:
        """The completion up to where our stop conditions end it."""
        if not done.tokens:
            raise ServerFault("reply", f"it ended by {made.reason} without a token")
        row = Row(one.request, one.sample)
        reason = row.extend(list(done.tokens), list(done.logps), None, self._decode)
        if reason is None:
            raise ServerFault("reply", f"it ended by {made.reason} after {len(done.tokens)} tokens")
        count = len(row.tokens)
        return replace(
            done,
            tokens=done.tokens[:count],
            logps=done.logps[:count],
            versions=done.versions[:count],
            reason=reason,
        )

    def _retry(self, one: _Sample, fault: ServerFault) -> None:
        """Queue a sample again; a UserError after too many faults, or for a refusal."""
        one.faults.append(fault)
        if fault.is_refusal or len(one.faults) > self._limits.retries:
            self._give_up(one.faults[0], len(one.faults))
        self._note(fault)
        self._waiting.append(one)

    def _note(self, fault: ServerFault) -> None:
        """What a fault says about the server: it may be dead, or have other weights."""
        self._is_suspect |= fault.may_be_dead
        if fault.kind == "weights":
            self._digests = None

    def _stop(
        self, running: list[_Sample], ended: list[tuple[_Sample, Completion]]
    ) -> list[Completion]:
        """Abort running samples; what there is of them and of ended ones, if it can be proved."""
        if not running and not ended:
            return []
        found = [done for _, done in ended]
        try:
            calls = self._dialect.abort([one.id for one in running]) if running else ()
            self._control(calls)
            found += [self._partial(one) if calls else self._dropped(one) for one in running]
            if self._transport is not None:
                self._proof.require(model=self._model, version=self._version or 0)
        except ServerFault as fault:
            self._note(fault)
            found = [one.aborted() for one, _ in ended] + [self._dropped(one) for one in running]
        for one in running:
            self._running.pop(one.id, None)
        return found

    def _partial(self, one: _Sample) -> Completion:
        """What there is of a sample that was aborted on the server."""
        future = one.future
        assert future is not None, "a running sample has a future"
        try:
            return self._completion(one, future.result(timeout=_ABORT_S))
        except (ServerFault, TimeoutError):
            return self._dropped(one)

    def _dropped(self, one: _Sample) -> Completion:
        self._running.pop(one.id, None)
        if one.future is not None:
            one.future.cancel()
        return one.aborted()

    # Weights.

    def send_weights(self, version: int) -> None:
        """Send the policy's weights as this version; returns once the server has them."""
        assert not self._running, "weights cannot change under running requests"
        self._version = version
        self._digests = None
        self._make_ready()

    def _make_ready(self) -> None:
        """Start the server if it is gone, and give it the policy's weights unless it has them."""
        faults: list[ServerFault] = []
        while True:
            self._end_dead_server()
            try:
                if self._server.start():
                    self._is_greeted = False
                if not self._is_greeted:
                    self._greet()
                    self._is_greeted = True
                if self._is_asleep:
                    self._control(self._dialect.wake())
                    self._is_asleep = False
                if self._digests is None and not self._has_own_weights:
                    self._requeue_running()
                    self._load()
            except ServerFault as fault:
                faults.append(fault)
                if fault.is_refusal or len(faults) > self._limits.retries:
                    self._give_up(faults[0], len(faults))
                self._note(fault)
                time.sleep(_BACKOFF_S)
            else:
                return

    def _end_dead_server(self) -> None:
        """After a fault: end a server of ours that is not healthy, so that it is started again."""
        is_suspect, self._is_suspect = self._is_suspect, False
        if is_suspect and self._server.can_restart:
            health = self._dialect.health()
            if not self._connection.is_ready(health):
                self._server.stop()

    def _greet(self) -> None:
        """Learn what a new server serves; its weights are unknown."""
        self._digests = None
        self._is_asleep = False
        if self._transport is not None:
            self._transport.reset()
        reply = self._connection.call(self._dialect.facts())
        facts = read_reply(self._dialect.read_facts, reply)
        longest = facts.max_model_len
        if longest is not None and longest < self._limits.max_model_len:
            why = f"the server takes sequences of at most {longest} tokens"
            fix = f"start it for {self._limits.max_model_len}, or lower max_model_len"
            raise UserError("actor_rollout_ref.rollout.max_model_len", longest, why, fix)
        self._model = facts.model

    def _load(self) -> None:
        """Send the weights and let the server prove that it has them."""
        own = tensor_digests(self.weights())
        if self._transport is not None:
            self._control(self._dialect.pause())
            tensors = self._tensors(self._policy)
            self._model = self._transport.send(self._version or 0, tensors) or self._model
            asks = self._dialect.digests()
            if asks is not None:
                digests = read_reply(self._dialect.read_digests, self._connection.call(asks))
                refuse_other_tensors(digests, tensor_digests(tensors))
            self._control(self._dialect.resume())
        self._proof.require(model=self._model, version=self._version or 0)
        self._digests = own

    def _control(self, calls: Any) -> None:
        for call in calls:
            self._connection.call(call)

    def _give_up(self, first: ServerFault, count: int) -> NoReturn:
        words = self._server.last_words()
        tail = f"\nThe end of its log:\n{words}" if words else ""
        why = f"the server failed {count} times, first with {first}{tail}"
        fix = "read the log of the server; the run can be resumed"
        raise UserError(_FIELD, self._dialect.name, why, fix) from first
