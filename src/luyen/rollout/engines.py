"""Rollout engines by name, plugin engines with checked output, engines for several versions."""

from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar, cast, final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint
from luyen.rollout.hf_engine import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.native.paged.engine import PagedEngine
from luyen.rollout.native.sequences import Decode
from luyen.rollout.protocol import (
    CacheStats,
    Completion,
    PrefixCaching,
    Request,
    RolloutEngine,
    completion_fault,
    rollout_engines,
)


@rollout_engines.register("native", splits=True)
def native(
    policy: Policy, rollout: RolloutConfig, *, longest: int, decode: Decode
) -> RolloutEngine:
    """The embedded engine; `longest` is the most tokens a sequence can have."""
    policy.is_exact = rollout.deterministic
    if policy.device.type == "cuda" and rollout.enable_rollout_routing_replay:
        field = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
        why = "on a GPU decode steps are captured graphs, which write no log of routers"
        raise UserError(field, value=True, why=why, fix="set it to false, or trainer.device to cpu")
    if policy.device.type == "cuda":
        return PagedEngine(
            policy,
            max_model_len=rollout.max_model_len or longest,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            decode=decode,
            is_open=rollout.multi_turn.enable,
            enable_prefix_caching=rollout.enable_prefix_caching,
        )
    return NativeEngine(
        policy,
        max_model_len=rollout.max_model_len or longest,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        decode=decode,
        is_open=rollout.multi_turn.enable,
        enable_prefix_caching=rollout.enable_prefix_caching,
        records_routes=rollout.enable_rollout_routing_replay,
    )


@rollout_engines.register("hf")
def hf(policy: Policy, rollout: RolloutConfig, *, longest: int, decode: Decode) -> RolloutEngine:
    """Plain Hugging Face generation."""
    return HfEngine(
        policy,
        decode=decode,
        max_model_len=rollout.max_model_len or longest,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
    )


T = TypeVar("T")


def make_checked_engine(
    name: str, build: Callable[[], RolloutEngine], *, vocabulary: int
) -> RolloutEngine:
    """The engine of this name; engines of plugins are wrapped in `CheckedEngine`."""
    if str(rollout_engines.get(name).__module__).startswith("luyen."):
        return build()
    found = _call_plugin(name, build)
    if found is None:
        _refuse(name, "its factory gave nothing")
    return CheckedEngine(name, found, vocabulary=vocabulary)


@final
class CheckedEngine:
    """An engine of a plugin, whose completions are validated against their requests.

    An exception or an invalid completion is a UserError that names the plugin. Without the check,
    a wrong token or a log-probability that is not a number would silently be trained on.
    """

    def __init__(self, name: str, inner: RolloutEngine, *, vocabulary: int) -> None:
        self._name = name
        self._inner = inner
        self._vocabulary = vocabulary
        self._pending: dict[str, tuple[Request, set[int]]] = {}
        """Requests by name, with the samples that are still to come."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running; an error where answers are missing then."""
        is_idle = bool(_call_plugin(self._name, lambda: self._inner.is_idle))
        if is_idle and self._pending:
            request, left = next(iter(self._pending.values()))
            _refuse(self._name, f"it is idle, and sample {min(left)} of {request.id} never came")
        return is_idle

    @property
    def is_batch_invariant(self) -> bool:
        """As the plugin reports it."""
        return bool(_call_plugin(self._name, lambda: self._inner.is_batch_invariant))

    def submit(self, request: Request) -> None:
        """Queue a request."""
        _call_plugin(self._name, lambda: self._inner.submit(request))
        self._pending[request.id] = request, set(range(len(request.keys)))

    def advance(self) -> list[Completion]:
        """Completions that it finished, validated."""
        found = self._completions(_call_plugin(self._name, self._inner.advance))
        for completion in found:
            self._check(completion)
        return found

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it."""
        only = () if sample is None else (sample,)
        found = self._completions(
            _call_plugin(self._name, lambda: self._inner.abort(request, *only))
        )
        for completion in found:
            self._check(completion)
        if request in self._pending:
            left = self._pending[request][1]
            left -= set(left) if sample is None else {sample}
            self._forget_done(request)
        return found

    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the loaded weights."""
        found = _call_plugin(self._name, self._inner.fingerprint)
        if found is not None and not isinstance(cast(object, found), Fingerprint):
            _refuse(self._name, f"its fingerprint is a {type(found).__name__}, not a Fingerprint")
        return found

    def drop_prefixes(self) -> None:
        """Free what the plugin cached of earlier prompts and answers, if it caches."""
        if isinstance(self._inner, PrefixCaching):
            _call_plugin(self._name, self._inner.drop_prefixes)

    def cache_stats(self) -> CacheStats:
        """What the plugin's prefix cache did so far."""
        caching = self._inner
        if not isinstance(caching, PrefixCaching):
            return CacheStats()
        found = _call_plugin(self._name, caching.cache_stats)
        if not isinstance(cast(object, found), CacheStats):
            _refuse(self._name, f"its cache_stats is a {type(found).__name__}, not CacheStats")
        return found

    def close(self) -> None:
        """Release memory and other resources."""
        _call_plugin(self._name, self._inner.close)

    def _completions(self, found: object) -> list[Completion]:
        if not isinstance(found, list):
            _refuse(self._name, f"it gave a {type(found).__name__}, not a list of completions")
        for item in cast(list[object], found):
            if not isinstance(item, Completion):
                _refuse(self._name, f"it gave a {type(item).__name__} among its completions")
        return cast(list[Completion], found)

    def _check(self, completion: Completion) -> None:
        """Refuse completions that are invalid or that no request is pending for."""
        pending = self._pending.get(completion.request)
        if pending is None or completion.sample not in pending[1]:
            what = f"sample {completion.sample!r} of request {completion.request!r}"
            _refuse(self._name, f"it answered {what}, which is not pending")
        why = completion_fault(completion, pending[0], vocabulary=self._vocabulary)
        if why is not None:
            _refuse(self._name, f"its answer to {completion.request}: {why}")
        pending[1].discard(completion.sample)
        self._forget_done(completion.request)

    def _forget_done(self, request: str) -> None:
        if not self._pending[request][1]:
            del self._pending[request]


def _call_plugin(name: str, call: Callable[[], T]) -> T:
    faults: list[BaseException] = []
    with boundary(faults):
        return call()
    if isinstance(faults[0], UserError):
        raise faults[0]
    why = f"it failed: {last_line(faults[0])}"
    raise UserError(rollout_engines.field, name, why, "fix the plugin") from faults[0]


def _refuse(name: str, why: str) -> NoReturn:
    fix = "fix the plugin; docs/extend.md describes what an engine returns"
    raise UserError(rollout_engines.field, name, why, fix)


@final
class VersionedEngines:
    """Several versions of the weights, each in its own engine; a request names its version.

    A long rollout keeps the weights it began with while new rollouts use newer ones.
    """

    def __init__(self, make: Callable[[], RolloutEngine], *, versions: int) -> None:
        """`make` builds one engine for each of the `versions` that can be loaded at once."""
        assert versions >= 1, "at least one version must be loaded"
        self._free = [make() for _ in range(versions)]
        self._first = self._free[-1]
        self._loaded: dict[int, RolloutEngine] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Loaded versions, the newest last."""
        return tuple(self._loaded)

    def engine(self, version: int | None = None) -> RolloutEngine:
        """The engine of a version; None: of the latest one, or the initial engine."""
        if version is None:
            return next(reversed(self._loaded.values()), self._first)
        assert version in self._loaded, f"version {version} of the weights is not here"
        return self._loaded[version]

    def hold(self, version: int, *, keep: Collection[int | None] = ()) -> RolloutEngine:
        """The engine for a version, whose weights are to be written into it.

        Other versions that are not in `keep` are unloaded first.
        """
        for other in [v for v in self._loaded if v != version and v not in keep]:
            engine = self._loaded.pop(other)
            assert engine.is_idle, f"version {other} of the weights is still generating"
            self._free.append(engine)
        if version not in self._loaded:
            assert self._free, f"versions {list(self._loaded)} leave no room for {version}"
            self._loaded[version] = self._free.pop()
        return self._loaded[version]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return all(engine.is_idle for engine in self.engines)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a completion does not depend on the other sequences in the batch."""
        return self._first.is_batch_invariant

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        self.engine(request.weights).submit(request)

    def advance(self) -> list[Completion]:
        """One pass of every engine that is not idle; the completions they finished."""
        return [
            completion
            for engine in self.engines
            if not engine.is_idle
            for completion in engine.advance()
        ]

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; its partial completions."""
        return [c for engine in self.engines for c in engine.abort(request, sample)]

    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the latest version; None: unknown."""
        return self.engine().fingerprint()

    def drop_prefixes(self) -> None:
        """Free what the engines cached of earlier prompts and answers."""
        for engine in self.engines:
            if isinstance(engine, PrefixCaching):
                engine.drop_prefixes()

    def cache_stats(self) -> CacheStats:
        """What the prefix cache of the latest version did so far."""
        engine = self.engine()
        return engine.cache_stats() if isinstance(engine, PrefixCaching) else CacheStats()

    def close(self) -> None:
        """Free what the engines hold; the weights stay."""
        for engine in self.engines:
            engine.close()

    @property
    def engines(self) -> list[RolloutEngine]:
        """All of them, loaded or free."""
        return [*self._loaded.values(), *self._free]
