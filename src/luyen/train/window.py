"""Rollouts as they finish, out of a window of those asked for: for speed, not for repetition.

The window holds as many groups as the steps that may be ahead need. A step takes what is finished,
the oldest first, and never leaves a group behind that would grow too old: it waits for that one.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from luyen.config.plan import is_swapping
from luyen.config.schema.trainer import Trainer
from luyen.rollout.single_turn import Group
from luyen.runtime.pending import Known
from luyen.telemetry.waits import waiting_for
from luyen.train.asked import Asked, Asking, Origin, Place, row_by_row
from luyen.train.supply import InOrder, Supply

_LOOK_S = 0.01
"""Between two looks at what has finished."""


@final
class Window:
    """Groups in the order in which they were asked for, taken when they are finished."""

    def __init__(self, asking: Asking, *, staleness: int) -> None:
        """`staleness` is how many steps behind the weights of a group may be when it is used."""
        self._asking = asking
        self._staleness = staleness
        self._asked: list[Asked] = []
        self._again: list[Place] = []
        self._taken = 0
        self._newest = 0
        self._origin: Origin = ("", None)

    def ask_up_to(self, step: int, *, version: int, origin: Origin) -> None:
        """Ask for groups until there are enough for all steps up to this one."""
        self._newest, self._origin = version, origin
        again, self._again = self._again, []
        for place in again:
            self._ask(place.step, place.first, place.rows)
        self._ask_more((step - self._taken) * self._asking.batch - len(self._asked))

    def take(self, step: int, *, before: Asked | None = None) -> Asked:
        """As many groups as a step has; where they did not fill it, as many again."""
        if before is not None:
            self._ask_more(self._asking.batch)
        chosen, self._taken = self._chosen(), step
        rows = tuple(row for one in chosen for row in one.place.rows)
        place = Place(step=step, first=0, rows=rows, version=self._newest, origin=self._origin)
        has_greedy = all(one.greedy is not None for one in chosen)
        return Asked(
            place=place,
            drawn=Known([group for one in chosen for group in one.drawn.result()]),
            greedy=Known([g for one in chosen for g in _greedy(one)]) if has_greedy else None,
            journal=before.journal
            if before is not None
            else self._asking.take_up(step, "work", self._origin),
        )

    def release(self) -> None:
        """Everything is drawn with the newest weights."""

    @property
    def outstanding(self) -> tuple[Asked, ...]:
        """What was asked for and not taken."""
        return tuple(self._asked)

    def kept(self) -> tuple[dict[str, Any], ...]:
        """Finished groups with their rollouts; of others the place, where they begin anew."""
        return tuple(one.as_it_is() for one in self._asked)

    def restore(self, step: int, kept: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what a checkpoint after `step` kept.

        A group that would be too old when its turn comes is asked for anew: the run may have had
        another staleness until then.
        """
        self._taken = step
        for tree in [one for some in kept for one in row_by_row(some)]:
            place = Place.from_json(tree)
            behind = step + len(self._asked) // self._asking.batch - place.version
            if tree["drawn"] is None or behind > self._staleness:
                self._again.append(place)
            else:
                self._asked.append(self._asking.restored(tree, None))

    def _ask_more(self, groups: int) -> None:
        for _ in range(groups):
            step, first = divmod(self._asking.cursor, self._asking.batch)
            self._ask(step + 1, first, self._asking.next_rows(1))

    def _ask(self, step: int, first: int, rows: tuple[int, ...]) -> None:
        place = Place(step=step, first=first, rows=rows, version=self._newest, origin=self._origin)
        # What several versions draw cannot be drawn again: no journal is of use to it.
        self._asked.append(self._asking.ask(place, None))

    def _chosen(self) -> list[Asked]:
        """The finished groups that were asked for first, and those that may not grow older."""
        oldest = self._newest - self._staleness
        due = [one for one in self._asked if one.place.version <= oldest][: self._asking.batch]
        while True:
            ready = [one for one in self._asked if one.is_done and one not in due]
            if all(one.is_done for one in due) and len(due) + len(ready) >= self._asking.batch:
                break
            with waiting_for("rollout"):
                time.sleep(_LOOK_S)
        picked = [*due, *ready][: self._asking.batch]
        self._asked = [one for one in self._asked if one not in picked]
        return picked


def supply_of(trainer: Trainer, asking: Asking) -> Supply:
    """Where the loop takes its rollouts from, as configured."""
    if is_swapping(trainer):
        return Window(asking, staleness=trainer.max_staleness)
    return InOrder(asking, staleness=trainer.max_staleness)


def _greedy(asked: Asked) -> list[Group]:
    assert asked.greedy is not None
    return asked.greedy.result()
