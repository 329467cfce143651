"""Rollouts that were asked for, and may not be there yet."""

from collections.abc import Callable, Sequence
from typing import Protocol, final

from luyen.rollout.single_turn import Group


class Pending(Protocol):
    """A generation that was asked for; `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether nobody has to wait for it."""
        ...

    def result(self) -> list[Group]:
        """The groups, in the order of their draws; raises what stopped the generation."""
        ...


@final
class InTurn:
    """A generation that is carried out when somebody wants its result.

    Example:
        >>> asked = InTurn(lambda: [])
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
class Known:
    """Groups that are there already.

    Example:
        >>> Known([]).done()
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
