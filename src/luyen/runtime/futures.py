"""Handles of work that may still be in progress: rollouts, updates and publications."""

from collections.abc import Callable, Sequence
from typing import Protocol, final

from luyen.engine.step import UpdateResult
from luyen.rollout.single_turn import Group


class RolloutFuture(Protocol):
    """A generation that was asked for; `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether nobody has to wait for it."""
        ...

    def result(self) -> list[Group]:
        """The groups, in the order of their draws; raises what stopped the generation."""
        ...


@final
class LazyRollouts:
    """A generation that is carried out when somebody wants its result.

    Example:
        >>> asked = LazyRollouts(lambda: [])
        >>> asked.done(), asked.result(), asked.done()
        (False, [], True)
    """

    def __init__(self, work: Callable[[], list[Group]]) -> None:
        self._work = work
        self._found: list[Group] | None = None

    def done(self) -> bool:
        """Whether it was carried out."""
        return self._found is not None

    def result(self) -> list[Group]:
        """The groups, drawn now if they were not before."""
        if self._found is None:
            self._found = self._work()
        return self._found


@final
class ReadyRollouts:
    """Groups that are there already.

    Example:
        >>> ReadyRollouts([]).done()
        True
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> list[Group]:
        """The groups."""
        return self._groups


class PendingUpdate(Protocol):
    """An optimizer step that was started."""

    def result(self) -> UpdateResult:
        """What it measured; raises what stopped it."""
        ...


@final
class CompletedUpdate:
    """An optimizer step that is done.

    Example:
        >>> CompletedUpdate(None).result() is None  # type: ignore[arg-type]
        True
    """

    def __init__(self, updated: UpdateResult) -> None:
        self._updated = updated

    def result(self) -> UpdateResult:
        """What it measured."""
        return self._updated


@final
class RunningUpdate:
    """An optimizer step that workers are taking.

    Example:
        >>> RunningUpdate(lambda: None).result() is None  # type: ignore[arg-type]
        True
    """

    def __init__(self, collect: Callable[[], UpdateResult]) -> None:
        self._collect = collect

    def result(self) -> UpdateResult:
        """Wait for the workers; raises what stopped the first of them."""
        return self._collect()


class Publication(Protocol):
    """Weights on their way to the engines that generate."""

    def wait(self) -> None:
        """Return when every engine has proved that it holds them; waiting twice is allowed."""
        ...


@final
class SharedWeights:
    """The publication of weights that trainer and engine share: there is nothing to send.

    Example:
        >>> SharedWeights().wait()
    """

    def wait(self) -> None:
        """Nothing is under way."""
