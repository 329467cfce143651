"""Several versions of the weights side by side, each in an engine of its own.

A rollout that takes long keeps the weights it began with while others begin with newer ones.
"""

from collections.abc import Callable, Collection
from typing import final

from luyen.models.fingerprint import Fingerprint
from luyen.rollout.protocol import Completion, Request, RolloutEngine


@final
class ResidentEngines:
    """An engine of engines: a request says which version of the weights must draw it."""

    def __init__(self, make: Callable[[], RolloutEngine], *, versions: int) -> None:
        """Room for so many versions; each has its own copy of what `make` makes."""
        assert versions >= 1, "somebody must draw"
        self._free = [make() for _ in range(versions)]
        self._first = self._free[-1]
        self._held: dict[int, RolloutEngine] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can draw, the newest last."""
        return tuple(self._held)

    def engine(self, version: int | None = None) -> RolloutEngine:
        """The engine of a version; None: of the one that came last, or as it was made."""
        if version is None:
            return next(reversed(self._held.values()), self._first)
        assert version in self._held, f"version {version} of the weights is not here"
        return self._held[version]

    def hold(self, version: int, *, keep: Collection[int | None] = ()) -> RolloutEngine:
        """The engine for a version, whose weights are to be written into it.

        Versions that are not in `keep` are let go first, unless they are this one.
        """
        for other in [v for v in self._held if v != version and v not in keep]:
            engine = self._held.pop(other)
            assert engine.is_idle, f"version {other} of the weights is still drawing"
            self._free.append(engine)
        if version not in self._held:
            assert self._free, f"versions {list(self._held)} leave no room for {version}"
            self._held[version] = self._free.pop()
        return self._held[version]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return all(engine.is_idle for engine in self._engines)

    @property
    def is_steady(self) -> bool:
        """Whether an answer does not depend on what else is drawn at the same time."""
        return self._first.is_steady

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        self.engine(request.weights).submit(request)

    def advance(self) -> list[Completion]:
        """A pass of every version that has work; what was finished."""
        return [
            completion
            for engine in self._engines
            if not engine.is_idle
            for completion in engine.advance()
        ]

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; what there is of its unfinished answers."""
        return [c for engine in self._engines for c in engine.abort(request, sample)]

    def fingerprint(self) -> Fingerprint | None:
        """The weights that came last; None: the engines cannot say."""
        return self.engine().fingerprint()

    def close(self) -> None:
        """Free what the engines hold; the weights stay."""
        for engine in self._engines:
            engine.close()

    @property
    def _engines(self) -> list[RolloutEngine]:
        return [*self._held.values(), *self._free]
