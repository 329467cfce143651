"""Rollout schedulers, ordered and FIFO: submit as far ahead as staleness allows, then take.

`OrderedScheduler` is deterministic: which rows are submitted, and with which version, depends on
the step number only, never on timing. With staleness k, step s is submitted when step s - k begins,
with the weights of that moment. `FifoScheduler` takes groups as they finish.
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
    """Submits rollouts ahead of training and hands them to the loop step by step."""

    def submit_up_to(self, step: int, *, version: int, origin: ParentDigest) -> None:
        """Submit, with this version, what steps up to `step` need and was not submitted yet."""
        ...

    def take(self, step: int, *, before: RolloutHandle | None = None) -> RolloutHandle:
        """The batch of a step; with `before`, a further one after a batch that was too small."""
        ...

    def release(self) -> None:
        """Release weight versions that no pending rollout needs."""
        ...

    @property
    def outstanding(self) -> tuple[RolloutHandle, ...]:
        """Handles that were submitted and not taken."""
        ...

    def snapshot(self) -> tuple[dict[str, Any], ...]:
        """JSON of the outstanding handles for a checkpoint."""
        ...

    def restore(self, step: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `snapshot` saved in a checkpoint after `step`."""
        ...


@final
class OrderedScheduler:
    """Each step takes the batch that was submitted for it: reproducible."""

    def __init__(self, submitter: RolloutSubmitter, *, staleness: int) -> None:
        """`staleness`: how many versions behind a batch may be when it is trained on."""
        self._submitter = submitter
        self._staleness = staleness
        self._pending: dict[int, RolloutHandle] = {}
        self._last = 0
        self._newest = 0
        self._origin = _UNKNOWN_PARENT
        self._unconfirmed: int | None = None
        """The prefetched step whose parent digest is not known yet."""

    def submit_up_to(self, step: int, *, version: int, origin: ParentDigest) -> None:
        """Submit the first batch of every step up to this one that has none."""
        self._newest, self._origin = version, origin
        for later in range(self._last + 1, step + 1):
            self._submit(
                later, version, origin, self._submitter.open_journal(later, "work", origin)
            )

    def prefetch(self, step: int, *, version: int) -> None:
        """Submit the next step's batch before its parent digest is known; `confirm` sets it."""
        assert step == self._last + 1, "steps are submitted in order"
        self._unconfirmed = step
        self._submit(
            step, version, _UNKNOWN_PARENT, self._submitter.open_journal(step, "work", None)
        )

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a prefetched step still lacks its parent digest."""
        return self._unconfirmed is not None

    def confirm(self, origin: ParentDigest, *, version: int) -> None:
        """Set the parent digest of the prefetched step, and begin its journal."""
        assert self._unconfirmed is not None, "no step was prefetched"
        step, self._unconfirmed = self._unconfirmed, None
        handle = self._pending[step]
        self._newest, self._origin = version, origin
        self._submitter.begin_journal(handle.journal, step, "work", origin)
        self._pending[step] = replace(handle, slot=replace(handle.slot, origin=origin))

    def _submit(
        self, step: int, version: int, origin: ParentDigest, journal: WorkJournal | None
    ) -> None:
        rows = self._submitter.next_rows(self._submitter.batch)
        slot = BatchSlot(step=step, first=0, rows=rows, version=version, origin=origin)
        self._pending[step] = self._submitter.submit(slot, journal)
        self._last = step

    def take(self, step: int, *, before: RolloutHandle | None = None) -> RolloutHandle:
        """The batch of a step; a further batch is generated with the newest weights.

        A resumed run has no weights older than its checkpoint.
        """
        if before is None:
            return self._pending.pop(step)
        rows, origin = self._submitter.next_rows(self._submitter.batch), self._origin
        first = before.slot.first + len(before.slot.rows)
        slot = BatchSlot(step=step, first=first, rows=rows, version=self._newest, origin=origin)
        # A journal belongs to one parent digest.
        is_same = before.slot.origin == origin
        journal = before.journal if is_same else self._submitter.open_journal(step, "more", origin)
        return self._submitter.submit(slot, journal)

    def release(self) -> None:
        """Release weight versions that no pending batch needs."""
        versions = {handle.slot.version for handle in self._pending.values()}
        self._submitter.roles.keep_weights(versions)

    @property
    def outstanding(self) -> tuple[RolloutHandle, ...]:
        """Handles that were submitted and not taken."""
        return tuple(self._pending.values())

    def snapshot(self) -> tuple[dict[str, Any], ...]:
        """JSON of all pending batches.

        With staleness, their weights are older than the checkpoint: rollouts are waited for and
        saved. Without it, an unfinished batch is regenerated from its rows on resume.
        """
        regenerate = self._staleness == 0
        pending = self._pending.values()
        return tuple(h.snapshot() if regenerate else h.as_json() for h in pending)

    def restore(self, step: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore saved batches; rows of batches that no longer fit are returned for resubmission.

        A batch does not fit when staleness or the kind of scheduler changed since it was saved.
        """
        self._last = step
        for tree in saved:
            slot = BatchSlot.from_json(tree)
            if tree["drawn"] is None or not self._is_next(slot):
                self._submitter.return_rows(slot.rows)
                continue
            journal = self._submitter.open_journal(slot.step, "work", slot.origin)
            self._pending[slot.step] = self._submitter.restore_handle(tree, journal)
            self._last = slot.step

    def _is_next(self, slot: BatchSlot) -> bool:
        """Whether a saved slot is the whole batch of the next step, and not too stale."""
        is_whole = slot.first == 0 and len(slot.rows) == self._submitter.batch
        age = slot.step - 1 - slot.version
        return slot.step == self._last + 1 and is_whole and age <= self._staleness


_POLL_S = 0.01
"""Interval between two polls for finished groups."""


@final
class FifoScheduler:
    """Takes groups as they finish, oldest first: for throughput, not reproducible.

    The window has as many groups as the steps that may run ahead need. A group that would exceed
    the staleness limit in the next step is always taken, and waited for if unfinished.
    """

    def __init__(self, submitter: RolloutSubmitter, *, staleness: int) -> None:
        """`staleness`: how many versions behind a group may be when it is trained on."""
        self._submitter = submitter
        self._staleness = staleness
        self._pending: list[RolloutHandle] = []
        self._resubmit: list[BatchSlot] = []
        self._taken = 0
        self._newest = 0
        self._origin: ParentDigest = ("", None)

    def submit_up_to(self, step: int, *, version: int, origin: ParentDigest) -> None:
        """Submit groups until there are enough for all steps up to this one."""
        self._newest, self._origin = version, origin
        resubmit, self._resubmit = self._resubmit, []
        for slot in resubmit:
            self._submit(slot.step, slot.first, slot.rows)
        self._submit_more((step - self._taken) * self._submitter.batch - len(self._pending))

    def take(self, step: int, *, before: RolloutHandle | None = None) -> RolloutHandle:
        """`train_batch_size` groups; with `before`, as many further ones."""
        if before is not None:
            self._submit_more(self._submitter.batch)
        chosen, self._taken = self._chosen(), step
        rows = tuple(row for one in chosen for row in one.slot.rows)
        slot = BatchSlot(step=step, first=0, rows=rows, version=self._newest, origin=self._origin)
        has_greedy = all(one.greedy is not None for one in chosen)
        return RolloutHandle(
            slot=slot,
            sampled=ReadyRollouts([group for one in chosen for group in one.sampled.result()]),
            greedy=ReadyRollouts([g for one in chosen for g in _greedy(one)])
            if has_greedy
            else None,
            journal=before.journal
            if before is not None
            else self._submitter.open_journal(step, "work", self._origin),
        )

    def release(self) -> None:
        """Nothing to release: everything is generated with the newest weights."""

    @property
    def outstanding(self) -> tuple[RolloutHandle, ...]:
        """Handles that were submitted and not taken."""
        return tuple(self._pending)

    def snapshot(self) -> tuple[dict[str, Any], ...]:
        """JSON of all pending groups; unfinished ones keep their slot only and are regenerated."""
        return tuple(one.snapshot() for one in self._pending)

    def restore(self, step: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore saved groups.

        Unfinished groups, and those that exceed the staleness limit of now, are resubmitted.
        """
        self._taken = step
        for tree in [one for some in saved for one in split_rows(some)]:
            slot = BatchSlot.from_json(tree)
            behind = step + len(self._pending) // self._submitter.batch - slot.version
            if tree["drawn"] is None or behind > self._staleness:
                self._resubmit.append(slot)
            else:
                self._pending.append(self._submitter.restore_handle(tree, None))

    def _submit_more(self, groups: int) -> None:
        for _ in range(groups):
            step, first = divmod(self._submitter.cursor, self._submitter.batch)
            self._submit(step + 1, first, self._submitter.next_rows(1))

    def _submit(self, step: int, first: int, rows: tuple[int, ...]) -> None:
        slot = BatchSlot(
            step=step, first=first, rows=rows, version=self._newest, origin=self._origin
        )
        # Rollouts of mixed versions cannot be reproduced, so they are not journaled.
        self._pending.append(self._submitter.submit(slot, None))

    def _chosen(self) -> list[RolloutHandle]:
        """Groups at the staleness limit, then the oldest finished ones; waits for enough."""
        oldest = self._newest - self._staleness
        due = [one for one in self._pending if one.slot.version <= oldest][: self._submitter.batch]
        while True:
            ready = [one for one in self._pending if one.is_done and one not in due]
            if all(one.is_done for one in due) and len(due) + len(ready) >= self._submitter.batch:
                break
            with waiting_for("rollout"):
                time.sleep(_POLL_S)
        picked = [*due, *ready][: self._submitter.batch]
        self._pending = [one for one in self._pending if one not in picked]
        return picked


def build_scheduler(trainer: TrainerConfig, submitter: RolloutSubmitter) -> RolloutScheduler:
    """The scheduler that the configuration selects."""
    if has_partial_rollouts(trainer):
        return FifoScheduler(submitter, staleness=trainer.max_staleness)
    return OrderedScheduler(submitter, staleness=trainer.max_staleness)


def _greedy(handle: RolloutHandle) -> list[Group]:
    assert handle.greedy is not None
    return handle.greedy.result()
