"""The rollout engine protocol: requests in, completions out."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, cast, final, get_args, runtime_checkable

from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.base.registry import Registry
from luyen.models.trained_weights import Fingerprint

Ending: TypeAlias = Literal["stop", "length", "aborted"]
"""Why generation of a sample ended."""
MOST_BARRED = 64
"""Most stop tokens of a request that has `min_new_tokens`: a device has so many places a row."""


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
    """Probability left by min-p, top-k, top-p and `min_new_tokens` at each token; empty when they
    are off."""
    versions: tuple[int, ...] = ()
    """Version of the weights that sampled each token; empty: the requested one."""


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
    }
    for name, (is_fine, why) in problems.items():
        if not is_fine:
            raise UserError(f"request {request.id}", name.strip(), why, f"change {name.strip()}")


_ROUNDING = 1e-3
"""How far above 0 a log-probability may be by rounding."""


def completion_fault(completion: Completion, request: Request, *, vocabulary: int) -> str | None:
    """Why a completion is invalid; None when it is valid."""
    tokens, logps = cast(tuple[Any, ...], completion.tokens), completion.logps
    streams = (tokens, logps, completion.kept_mass, completion.versions)
    if not all(isinstance(stream, tuple) for stream in cast(tuple[object, ...], streams)):
        return "tokens, logps, kept_mass and versions are tuples"
    most = request.sampling.max_new_tokens
    if len(tokens) > most:
        return f"it has {len(tokens)} tokens, and at most {most} were wanted"
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        return f"tokens are whole numbers from 0 to {vocabulary - 1}"
    wanted = {"logps": (len(tokens),), "kept_mass": (0, len(tokens)), "versions": (0, len(tokens))}
    for (name, lengths), stream in zip(wanted.items(), streams[1:], strict=True):
        if len(stream) not in lengths:
            return f"{name} has {len(stream)} entries for {len(tokens)} tokens"
    if not all(_is_number(logp) and logp <= _ROUNDING for logp in logps):
        return "a log-probability is a finite number of at most 0"
    if not all(_is_number(mass) and 0 < mass <= 1 + _ROUNDING for mass in completion.kept_mass):
        return "kept_mass is a probability above 0"
    if not all(type(version) is int for version in completion.versions):
        return "versions are whole numbers"
    return None if completion.reason in get_args(Ending) else f"it ended by {completion.reason!r}"


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
