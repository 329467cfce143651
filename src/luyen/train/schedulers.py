"""Rollout schedulers, ordered and FIFO: submit as far ahead as staleness allows, then take.

What is asked for, and with which weights, depends on the loop alone and never on a clock, so that a
run draws the same batches whatever takes long. With staleness k, step s is asked for when k steps
before it are still to be trained on: by the weights of then, which it keeps.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

from luyen.config.plan import has_partial_rollouts
from luyen.config.schema.trainer import TrainerConfig
from luyen.rollout.single_turn import Group
from luyen.runtime.futures import ReadyRollouts
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.spans import waiting_for
from luyen.train.rollouts import (
    BatchSlot,
    ParentDigest,
    RolloutHandle,
    RolloutSubmitter,
    split_rows,
)

_UNKNOWN_PARENT: ParentDigest = ("", None)


class RolloutScheduler(Protocol):
    """Where the loop takes its rollouts from."""

    def ask_up_to(self, step: int, *, version: int, origin: ParentDigest) -> None:
        """Ask for what the steps up to this one need and was not asked for, with these weights."""
        ...

    def take(self, step: int, *, before: RolloutHandle | None = None) -> RolloutHandle:
        """Groups for a step; `before` are those that did not fill it."""
        ...

    def release(self) -> None:
        """The step has what it needs: let the weights go that nothing in progress needs."""
        ...

    @property
    def outstanding(self) -> tuple[RolloutHandle, ...]:
        """What was asked for and not taken."""
        ...

    def kept(self) -> tuple[dict[str, Any], ...]:
        """What a checkpoint keeps of it."""
        ...

    def restore(self, step: int, kept: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what a checkpoint after `step` kept."""
        ...


@final
class OrderedScheduler:
    """Each step gets the rows that were asked for it."""

    def __init__(self, submitter: RolloutSubmitter, *, staleness: int) -> None:
        """`staleness` is how many steps behind the weights of a batch may be when it is used."""
        self._submitter = submitter
        self._staleness = staleness
        self._asked: dict[int, RolloutHandle] = {}
        self._last = 0
        self._newest = 0
        self._origin = _UNKNOWN_PARENT
        self._early: int | None = None
        """The step that was asked for before it was known what the run is then."""

    def ask_up_to(self, step: int, *, version: int, origin: ParentDigest) -> None:
        """Ask for the first batch of every step up to this one, of which none was asked for."""
        self._newest, self._origin = version, origin
        for later in range(self._last + 1, step + 1):
            self._ask(later, version, origin, self._submitter.take_up(later, "work", origin))

    def ask_early(self, step: int, *, version: int) -> None:
        """Ask for the batch of a step before it is known what the run is then (`know`)."""
        assert step == self._last + 1, "one step comes after the other"
        self._early = step
        self._ask(step, version, _UNKNOWN_PARENT, self._submitter.take_up(step, "work", None))

    @property
    def has_early(self) -> bool:
        """Whether something was asked for of which the origin is not known yet."""
        return self._early is not None

    def know(self, origin: ParentDigest, *, version: int) -> None:
        """What was asked for early has this origin; its work is written down from now on."""
        assert self._early is not None, "nothing was asked for early"
        step, self._early = self._early, None
        asked = self._asked[step]
        self._newest, self._origin = version, origin
        self._submitter.begin_work(asked.journal, step, "work", origin)
        self._asked[step] = replace(asked, place=replace(asked.place, origin=origin))

    def _ask(
        self, step: int, version: int, origin: ParentDigest, journal: WorkJournal | None
    ) -> None:
        rows = self._submitter.next_rows(self._submitter.batch)
        place = BatchSlot(step=step, first=0, rows=rows, version=version, origin=origin)
        self._asked[step] = self._submitter.ask(place, journal)
        self._last = step

    def take(self, step: int, *, before: RolloutHandle | None = None) -> RolloutHandle:
        """The batch of a step; after the first, more rows drawn with the newest weights.

        Older ones may be gone: a run that goes on has those of its checkpoint and no others.
        """
        if before is None:
            return self._asked.pop(step)
        rows, origin = self._submitter.next_rows(self._submitter.batch), self._origin
        first = before.place.first + len(before.place.rows)
        place = BatchSlot(step=step, first=first, rows=rows, version=self._newest, origin=origin)
        # A journal stands for the weights of one moment.
        is_same = before.place.origin == origin
        journal = before.journal if is_same else self._submitter.take_up(step, "more", origin)
        return self._submitter.ask(place, journal)

    def release(self) -> None:
        """Let the weights go that no batch in progress needs."""
        versions = {asked.place.version for asked in self._asked.values()}
        self._submitter.roles.keep_weights(versions)

    @property
    def outstanding(self) -> tuple[RolloutHandle, ...]:
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
            place = BatchSlot.from_json(tree)
            if tree["drawn"] is None or not self._is_next(place):
                self._submitter.give_back(place.rows)
                continue
            journal = self._submitter.take_up(place.step, "work", place.origin)
            self._asked[place.step] = self._submitter.restored(tree, journal)
            self._last = place.step

    def _is_next(self, place: BatchSlot) -> bool:
        """Whether rows are the batch that comes after what is there, and not too old for it."""
        is_whole = place.first == 0 and len(place.rows) == self._submitter.batch
        age = place.step - 1 - place.version
        return place.step == self._last + 1 and is_whole and age <= self._staleness


# Rollouts as they finish, out of a window of those asked for: for speed, not for repetition.
#
# The window holds as many groups as the steps that may be ahead need. A step takes what is
# finished, the oldest first, and never leaves a group behind that would grow too old: it waits
# for that one.

_POLL_S = 0.01
"""Between two looks at what has finished."""


@final
class FifoScheduler:
    """Groups in the order in which they were asked for, taken when they are finished."""

    def __init__(self, submitter: RolloutSubmitter, *, staleness: int) -> None:
        """`staleness` is how many steps behind the weights of a group may be when it is used."""
        self._submitter = submitter
        self._staleness = staleness
        self._asked: list[RolloutHandle] = []
        self._again: list[BatchSlot] = []
        self._taken = 0
        self._newest = 0
        self._origin: ParentDigest = ("", None)

    def ask_up_to(self, step: int, *, version: int, origin: ParentDigest) -> None:
        """Ask for groups until there are enough for all steps up to this one."""
        self._newest, self._origin = version, origin
        again, self._again = self._again, []
        for place in again:
            self._ask(place.step, place.first, place.rows)
        self._ask_more((step - self._taken) * self._submitter.batch - len(self._asked))

    def take(self, step: int, *, before: RolloutHandle | None = None) -> RolloutHandle:
        """As many groups as a step has; where they did not fill it, as many again."""
        if before is not None:
            self._ask_more(self._submitter.batch)
        chosen, self._taken = self._chosen(), step
        rows = tuple(row for one in chosen for row in one.place.rows)
        place = BatchSlot(step=step, first=0, rows=rows, version=self._newest, origin=self._origin)
        has_greedy = all(one.greedy is not None for one in chosen)
        return RolloutHandle(
            place=place,
            drawn=ReadyRollouts([group for one in chosen for group in one.drawn.result()]),
            greedy=ReadyRollouts([g for one in chosen for g in _greedy(one)])
            if has_greedy
            else None,
            journal=before.journal
            if before is not None
            else self._submitter.take_up(step, "work", self._origin),
        )

    def release(self) -> None:
        """Everything is drawn with the newest weights."""

    @property
    def outstanding(self) -> tuple[RolloutHandle, ...]:
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
        for tree in [one for some in kept for one in split_rows(some)]:
            place = BatchSlot.from_json(tree)
            behind = step + len(self._asked) // self._submitter.batch - place.version
            if tree["drawn"] is None or behind > self._staleness:
                self._again.append(place)
            else:
                self._asked.append(self._submitter.restored(tree, None))

    def _ask_more(self, groups: int) -> None:
        for _ in range(groups):
            step, first = divmod(self._submitter.cursor, self._submitter.batch)
            self._ask(step + 1, first, self._submitter.next_rows(1))

    def _ask(self, step: int, first: int, rows: tuple[int, ...]) -> None:
        place = BatchSlot(
            step=step, first=first, rows=rows, version=self._newest, origin=self._origin
        )
        # What several versions draw cannot be drawn again: no journal is of use to it.
        self._asked.append(self._submitter.ask(place, None))

    def _chosen(self) -> list[RolloutHandle]:
        """The finished groups that were asked for first, and those that may not grow older."""
        oldest = self._newest - self._staleness
        due = [one for one in self._asked if one.place.version <= oldest][: self._submitter.batch]
        while True:
            ready = [one for one in self._asked if one.is_done and one not in due]
            if all(one.is_done for one in due) and len(due) + len(ready) >= self._submitter.batch:
                break
            with waiting_for("rollout"):
                time.sleep(_POLL_S)
        picked = [*due, *ready][: self._submitter.batch]
        self._asked = [one for one in self._asked if one not in picked]
        return picked


def build_scheduler(trainer: TrainerConfig, submitter: RolloutSubmitter) -> RolloutScheduler:
    """Where the loop takes its rollouts from, as configured."""
    if has_partial_rollouts(trainer):
        return FifoScheduler(submitter, staleness=trainer.max_staleness)
    return OrderedScheduler(submitter, staleness=trainer.max_staleness)


def _greedy(asked: RolloutHandle) -> list[Group]:
    assert asked.greedy is not None
    return asked.greedy.result()
