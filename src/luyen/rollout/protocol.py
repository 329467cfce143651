"""The rollout engine protocol: requests in, completions out."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, cast, final, get_args, runtime_checkable

from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.base.records import ExpertRoutes
from luyen.base.registry import Registry
from luyen.models.weights import Fingerprint

Ending: TypeAlias = Literal["stop", "length", "aborted"]
"""Why generation of a sample ended."""
MOST_BARRED = 64
"""Most stop tokens of a request that has `min_new_tokens`: a device has so many places a row."""
MOST_TOP_LOGPROBS = 20
"""Most alternatives that a request may ask for at each token."""
TopLogps: TypeAlias = tuple[tuple[int, float], ...]
"""(id, log-probability) of the likeliest tokens, sorted by log-probability, then by id."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop conditions of a request.

    Example:
        >>> Sampling(max_new_tokens=8, temperature=0.0).is_greedy
        True
    """

    max_new_tokens: int
    """Most tokens to generate."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = -1
    """Sample from the k likeliest tokens; -1 or 0: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of this total probability."""
    min_p: float = 0.0
    """Sample from tokens at least this likely, relative to the likeliest."""
    min_new_tokens: int = 0
    """Stop tokens and stop strings are ignored before this many tokens."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the token itself is kept."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends the answer; every token is kept, also the one that completes it."""
    ignore_stop: bool = False
    """Always generate `max_new_tokens` tokens, for benchmarks."""
    top_logprobs: int = 0
    """Likeliest tokens to report at each generated token, at most 20; 0: none."""

    def within(self, room: int) -> "Sampling":
        """The same with at most `room` tokens."""
        return replace(self, max_new_tokens=min(room, self.max_new_tokens))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p rules out tokens."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def barred_ids(self) -> frozenset[int]:
        """Tokens that may not be sampled before `min_new_tokens`."""
        return self.stop_ids if self.min_new_tokens > 0 and not self.ignore_stop else frozenset()

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are ruled out, so that samples do not follow the full softmax."""
        return self.is_filtered or bool(self.barred_ids)


class ConstraintState(Protocol):
    """What a constraint allows after the tokens of one sample so far."""

    def allowed(self) -> Tensor:
        """Bool `[vocabulary]`, on the CPU: tokens that may come next.

        Stop tokens are among them exactly when the answer may end here.
        """
        ...

    def accept(self, token: int) -> None:
        """Append an allowed token."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but a stop token may follow."""
        ...


class TokenConstraint(Protocol):
    """A rule for the tokens of an answer, such as a grammar; samples share it."""

    def start(self) -> ConstraintState:
        """The state before the first token; each sample has its own."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and the random keys of the samples to generate for it.

    Example:
        >>> Request(id="a", tokens=(1, 2), keys=(7, 8), sampling=Sampling(max_new_tokens=4)).id
        'a'
    """

    id: str
    """Name that completions refer to."""
    tokens: tuple[int, ...]
    """The prompt."""
    keys: tuple[int, ...]
    """One random key per answer (`luyen.base.seeds.derive_key`)."""
    sampling: Sampling
    """Sampling parameters."""
    weights: int | None = None
    """Version of the weights to generate with, if several are loaded; None: the latest."""
    constraint: TokenConstraint | None = None
    """What answers must be like; None: anything. An answer ends by `stop` when it is finished, and
    is aborted where no token is allowed."""

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are ruled out, so that samples do not follow the full softmax."""
        return self.sampling.is_truncated or self.constraint is not None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generated sample.

    Example:
        >>> Completion(request="a", sample=0, tokens=(5,), logps=(-0.1,), reason="stop").tokens
        (5,)
    """

    request: str
    """Id of its request."""
    sample: int
    """Index of its key in the request."""
    tokens: tuple[int, ...]
    """Generated tokens, the stop token included."""
    logps: tuple[float, ...]
    """fp32 log-probability of each under the temperature-scaled full softmax (greedy: unscaled)."""
    reason: Ending
    """Why it ended."""
    kept_mass: tuple[float, ...] = ()
    """Probability left by min-p, top-k, top-p, `min_new_tokens` and a constraint at each token;
    empty when they are off."""
    versions: tuple[int, ...] = ()
    """Version of the weights that sampled each token; empty: the requested one."""
    top_logps: tuple[TopLogps, ...] = ()
    """The likeliest tokens at each token, with log-probabilities like `logps`; empty unless
    `top_logprobs` is set."""
    routes: ExpertRoutes | None = None
    """Experts of the prompt's tokens and of all generated ones but the last, which was not read;
    None: the engine does not record them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """What a running sample has generated so far, or the end of it.

    Example:
        >>> TokenStream(tokens=(5,), logps=(-0.1,)).top_logps
        ()
    """

    tokens: tuple[int, ...]
    """Generated tokens."""
    logps: tuple[float, ...]
    """Their log-probabilities, as in `Completion`."""
    top_logps: tuple[TopLogps, ...] = ()
    """The likeliest tokens at each of them, as in `Completion`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a prefix cache did since its engine was made, and what it has now.

    Example:
        >>> CacheStats(tokens=10, reused_tokens=6).reused_tokens
        6
    """

    prompts: int = 0
    """Prompts that were read."""
    hits: int = 0
    """Prompts of which a part was cached."""
    tokens: int = 0
    """Tokens of these prompts."""
    reused_tokens: int = 0
    """Tokens of these prompts that were cached, and not computed again."""
    blocks: int = 0
    """Blocks of tokens that are cached now."""
    block_size: int = 0
    """Tokens of a block."""
    evictions: int = 0
    """Blocks that made room for newer ones."""
    drops: int = 0
    """Times that everything was dropped, because the weights changed or memory was needed."""


class RolloutEngine(Protocol):
    """Generates for many requests at once."""

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        ...

    def advance(self) -> list[Completion]:
        """Run one pass; the completions that it finished."""
        ...

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; its partial completions."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a completion does not depend on the other sequences in the batch."""
        ...

    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the loaded weights; None: unknown."""
        ...

    def close(self) -> None:
        """Release memory and other resources."""
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that can be asked for the tokens of a sample while it generates it."""

    def snapshot(self, request: str, sample: int, *, start: int = 0) -> TokenStream | None:
        """Tokens from number `start` on of a sample that waits or runs; None: it does neither."""
        ...


@runtime_checkable
class PrefixCaching(Protocol):
    """An engine that keeps keys and values of prefixes between two requests."""

    def drop_prefixes(self) -> None:
        """Free what is cached; requests go on."""
        ...

    def cache_stats(self) -> CacheStats:
        """What the cache did so far."""
        ...


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine that samples in another process, with a copy of its policy's weights.

    The policy is the trainer's own, or a copy that published weights are written into. A server
    that was lost gets its weights from the policy again.
    """

    def weights(self) -> Mapping[str, Tensor]:
        """Trained parameters of the policy, to write new values into."""
        ...

    def send_weights(self, version: int) -> None:
        """Send the policy's weights as this version; returns once the engine proved to have them.

        No request may be running.
        """
        ...

    def rest(self) -> None:
        """Free memory until the next request."""
        ...


def drop_prefixes(engine: RolloutEngine) -> None:
    """Free what an engine cached of earlier prompts and answers: its weights change."""
    if isinstance(engine, PrefixCaching):
        engine.drop_prefixes()


rollout_engines: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine", "actor_rollout_ref.rollout.name"
)


def refuse_impossible(request: Request, *, vocabulary: int, can_decode: bool = True) -> None:
    """A UserError for a request that no engine can serve."""
    sampling, barred = request.sampling, request.sampling.barred_ids
    tokens = request.tokens or (0,)
    is_known = min(tokens) >= 0 and max(tokens) < vocabulary
    problems = {
        "tokens": (bool(request.tokens), "a prompt has at least one token"),
        "tokens ": (is_known, f"ids go from 0 to {vocabulary - 1}"),
        "keys": (bool(request.keys), "each answer needs a random key"),
        "max_new_tokens": (sampling.max_new_tokens >= 1, "an answer has at least one token"),
        "temperature": (sampling.temperature >= 0, "it is 0 (greedy) or more"),
        "top_k": (sampling.top_k >= -1, "it is a number of tokens, or -1 for all"),
        "top_p": (0 < sampling.top_p <= 1, "it is a share of the probability above 0"),
        "min_p": (0 <= sampling.min_p <= 1, "it is relative to the likeliest token"),
        "min_new_tokens": (sampling.min_new_tokens >= 0, "it is a number of tokens"),
        "stop_ids": (len(barred) < vocabulary, "they leave no token to begin with"),
        "stop_ids ": (len(barred) <= MOST_BARRED, f"at most {MOST_BARRED} wait for a length"),
        "stop_strings": (can_decode or not sampling.stop_strings, "the engine cannot decode text"),
        "stop_strings ": (all(sampling.stop_strings), "an empty one ends every answer"),
        "top_logprobs": (
            0 <= sampling.top_logprobs <= MOST_TOP_LOGPROBS,
            f"at most {MOST_TOP_LOGPROBS} likeliest tokens can be reported",
        ),
        "ignore_stop": (
            request.constraint is None or not sampling.ignore_stop,
            "a constraint decides where an answer ends",
        ),
        "min_new_tokens ": (
            request.constraint is None or sampling.min_new_tokens == 0,
            "a constraint decides where an answer ends",
        ),
    }
    for name, (is_fine, why) in problems.items():
        if not is_fine:
            raise UserError(f"request {request.id}", name.strip(), why, f"change {name.strip()}")
    if request.constraint is not None:
        _refuse_empty_constraint(request, request.constraint, vocabulary)


def _refuse_empty_constraint(request: Request, constraint: TokenConstraint, size: int) -> None:
    allowed = constraint.start().allowed()
    if allowed.shape != (size,):
        why = f"it is for {allowed.numel()} tokens, and the model has {size}"
        fix = "build it from the tokenizer of the model"
        raise UserError(f"request {request.id}", "constraint", why, fix)
    if not bool(allowed.any()):
        why, fix = "no token may begin an answer under it", "allow one that the tokenizer has"
        raise UserError(f"request {request.id}", "constraint", why, fix)


def refuse_options(
    request: Request, engine: str, *, top_logprobs: bool = False, constraint: bool = False
) -> None:
    """A UserError for an option that the request has and the engine of this name has not.

    `top_logprobs` and `constraint` say which of them the engine has.
    """
    missing = {
        "top_logprobs": request.sampling.top_logprobs > 0 and not top_logprobs,
        "constraint": request.constraint is not None and not constraint,
    }
    for name, is_missing in missing.items():
        if is_missing:
            fix = f"leave {name} out, or use the engine `native`"
            raise UserError(f"request {request.id}", name, f"`{engine}` does not have it", fix)


_ROUNDING = 1e-3
"""How far above 0 a log-probability may be by rounding."""


def completion_fault(completion: Completion, request: Request, *, vocabulary: int) -> str | None:
    """Why a completion is invalid; None when it is valid."""
    tokens, logps = cast(tuple[Any, ...], completion.tokens), completion.logps
    tops = completion.top_logps
    streams = (tokens, logps, completion.kept_mass, completion.versions, tops)
    if not all(isinstance(stream, tuple) for stream in cast(tuple[object, ...], streams)):
        return "tokens, logps, kept_mass, versions and top_logps are tuples"
    most = request.sampling.max_new_tokens
    if len(tokens) > most:
        return f"it has {len(tokens)} tokens, and at most {most} were wanted"
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        return f"tokens are whole numbers from 0 to {vocabulary - 1}"
    count = len(tokens)
    wanted = {"logps": (count,), "kept_mass": (0, count), "versions": (0, count)}
    wanted["top_logps"] = (count if request.sampling.top_logprobs > 0 else 0,)
    for (name, lengths), stream in zip(wanted.items(), streams[1:], strict=True):
        if len(stream) not in lengths:
            return f"{name} has {len(stream)} entries for {len(tokens)} tokens"
    if not all(_is_number(logp) and logp <= _ROUNDING for logp in logps):
        return "a log-probability is a finite number of at most 0"
    # What a constraint leaves may round to 0.
    least = math.ulp(0.0) if request.constraint is None else 0.0
    if not all(_is_number(m) and least <= m <= 1 + _ROUNDING for m in completion.kept_mass):
        return "kept_mass is a probability above 0"
    if not all(type(version) is int for version in completion.versions):
        return "versions are whole numbers"
    why = _top_fault(tops, request.sampling.top_logprobs, vocabulary)
    if why is None and request.constraint is not None:
        why = _constraint_fault(tokens, request.constraint)
    if why is not None:
        return why
    return None if completion.reason in get_args(Ending) else f"it ended by {completion.reason!r}"


def _top_fault(tops: tuple[TopLogps, ...], most: int, vocabulary: int) -> str | None:
    """Why a stream of likeliest tokens is invalid."""
    for top in cast(tuple[Any, ...], tops):
        pairs = cast(list[tuple[Any, Any]], [*top] if isinstance(top, tuple) else [])
        is_pairs = all(isinstance(cast(object, pair), tuple) and len(pair) == 2 for pair in pairs)
        if len(pairs) != min(most, vocabulary) or not is_pairs:
            return f"top_logps has {min(most, vocabulary)} pairs of id and logp at each token"
        if not all(type(token) is int and 0 <= token < vocabulary for token, _ in pairs):
            return f"ids in top_logps are whole numbers from 0 to {vocabulary - 1}"
        if not all(type(logp) is float and logp <= _ROUNDING for _, logp in pairs):
            return "a log-probability in top_logps is a number of at most 0"
        if pairs != sorted(set(pairs), key=lambda pair: (-pair[1], pair[0])):
            return "top_logps is sorted by log-probability, then by id"
    return None


def _constraint_fault(tokens: tuple[int, ...], constraint: TokenConstraint) -> str | None:
    """Why an answer is not one that the constraint allows."""
    state = constraint.start()
    for place, token in enumerate(tokens):
        if state.is_finished or not bool(state.allowed()[token]):
            return f"the constraint does not allow token {place}"
        state.accept(token)
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def generate(
    engine: RolloutEngine,
    requests: Iterable[Request],
    *,
    finished: Callable[[Completion], None] | None = None,
) -> dict[tuple[str, int], Completion]:
    """Completions of all requests, by request id and sample.

    `finished` is called with each completion as soon as it is there.
    """
    submitted = list(requests)
    assert len({request.id for request in submitted}) == len(submitted), "two requests share an id"
    for request in submitted:
        engine.submit(request)
    found: dict[tuple[str, int], Completion] = {}

    def keep(completion: Completion) -> None:
        found[completion.request, completion.sample] = completion
        if finished is not None:
            finished(completion)

    finish(engine, keep)
    return dict(sorted(found.items()))


def finish(engine: RolloutEngine, finished: Callable[[Completion], None]) -> None:
    """Advance an engine until it is idle; `finished` is called with each completion."""
    while not engine.is_idle:
        for completion in engine.advance():
            finished(completion)
        beat()
