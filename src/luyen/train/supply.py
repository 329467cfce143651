"""Rollouts in the order of the steps they are for, asked for as far ahead as allowed.

What is asked for, and with which weights, depends on the loop alone and never on a clock, so that a
run draws the same batches whatever takes long. With staleness k, step s is asked for when k steps
before it are still to be trained on: by the weights of then, which it keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

from luyen.telemetry.journal import WorkJournal
from luyen.train.asked import Asked, Asking, Origin, Place

_UNKNOWN: Origin = ("", None)


class Supply(Protocol):
    """Where the loop takes its rollouts from."""

    def ask_up_to(self, step: int, *, version: int, origin: Origin) -> None:
        """Ask for what the steps up to this one need and was not asked for, with these weights."""
        ...

    def take(self, step: int, *, before: Asked | None = None) -> Asked:
        """Groups for a step; `before` are those that did not fill it."""
        ...

    def release(self) -> None:
        """The step has what it needs: let the weights go that nothing in progress needs."""
        ...

    @property
    def outstanding(self) -> tuple[Asked, ...]:
        """What was asked for and not taken."""
        ...

    def kept(self) -> tuple[dict[str, Any], ...]:
        """What a checkpoint keeps of it."""
        ...

    def restore(self, step: int, kept: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what a checkpoint after `step` kept."""
        ...


@final
class InOrder:
    """Each step gets the rows that were asked for it."""

    def __init__(self, asking: Asking, *, staleness: int) -> None:
        """`staleness` is how many steps behind the weights of a batch may be when it is used."""
        self._asking = asking
        self._staleness = staleness
        self._asked: dict[int, Asked] = {}
        self._last = 0
        self._newest = 0
        self._origin = _UNKNOWN
        self._early: int | None = None
        """The step that was asked for before it was known what the run is then."""

    def ask_up_to(self, step: int, *, version: int, origin: Origin) -> None:
        """Ask for the first batch of every step up to this one, of which none was asked for."""
        self._newest, self._origin = version, origin
        for later in range(self._last + 1, step + 1):
            self._ask(later, version, origin, self._asking.take_up(later, "work", origin))

    def ask_early(self, step: int, *, version: int) -> None:
        """Ask for the batch of a step before it is known what the run is then (`know`)."""
        assert step == self._last + 1, "one step comes after the other"
        self._early = step
        self._ask(step, version, _UNKNOWN, self._asking.take_up(step, "work", None))

    @property
    def has_early(self) -> bool:
        """Whether something was asked for of which the origin is not known yet."""
        return self._early is not None

    def know(self, origin: Origin, *, version: int) -> None:
        """What was asked for early has this origin; its work is written down from now on."""
        assert self._early is not None, "nothing was asked for early"
        step, self._early = self._early, None
        asked = self._asked[step]
        self._newest, self._origin = version, origin
        self._asking.begin_work(asked.journal, step, "work", origin)
        self._asked[step] = replace(asked, place=replace(asked.place, origin=origin))

    def _ask(self, step: int, version: int, origin: Origin, journal: WorkJournal | None) -> None:
        rows = self._asking.next_rows(self._asking.batch)
        place = Place(step=step, first=0, rows=rows, version=version, origin=origin)
        self._asked[step] = self._asking.ask(place, journal)
        self._last = step

    def take(self, step: int, *, before: Asked | None = None) -> Asked:
        """The batch of a step; after the first, more rows drawn with the newest weights.

        Older ones may be gone: a run that goes on has those of its checkpoint and no others.
        """
        if before is None:
            return self._asked.pop(step)
        rows, origin = self._asking.next_rows(self._asking.batch), self._origin
        first = before.place.first + len(before.place.rows)
        place = Place(step=step, first=first, rows=rows, version=self._newest, origin=origin)
        # A journal stands for the weights of one moment.
        is_same = before.place.origin == origin
        journal = before.journal if is_same else self._asking.take_up(step, "more", origin)
        return self._asking.ask(place, journal)

    def release(self) -> None:
        """Let the weights go that no batch in progress needs."""
        versions = {asked.place.version for asked in self._asked.values()}
        self._asking.roles.keep_weights(versions)

    @property
    def outstanding(self) -> tuple[Asked, ...]:
        """What was asked for and not taken."""
        return tuple(self._asked.values())

    def kept(self) -> tuple[dict[str, Any], ...]:
        """All of it with every rollout; those in progress are waited for.

        The weights that draw them are not those of the checkpoint. Where they are, because nothing
        is drawn ahead, only the rows are kept: the same will be drawn again.
        """
        is_anew = self._staleness == 0
        return tuple(a.as_it_is() if is_anew else a.as_json() for a in self._asked.values())

    def restore(self, step: int, kept: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what a checkpoint after `step` kept; what is no use now is asked for anew.

        The run may have had another staleness, or another order, until then.
        """
        self._last = step
        for tree in kept:
            place = Place.from_json(tree)
            if tree["drawn"] is None or not self._is_next(place):
                self._asking.give_back(place.rows)
                continue
            journal = self._asking.take_up(place.step, "work", place.origin)
            self._asked[place.step] = self._asking.restored(tree, journal)
            self._last = place.step

    def _is_next(self, place: Place) -> bool:
        """Whether rows are the batch that comes after what is there, and not too old for it."""
        is_whole = place.first == 0 and len(place.rows) == self._asking.batch
        age = place.step - 1 - place.version
        return place.step == self._last + 1 and is_whole and age <= self._staleness
