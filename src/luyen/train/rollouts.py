"""Rollouts of training rows: requests, handles, their form in checkpoints, and the scheduler.

A scheduler submits as far ahead as staleness allows. `OrderedScheduler` is deterministic: which
rows are submitted, and with which version, depends on the step number only, never on timing. With
staleness k, step s is submitted when step s - k begins, with the weights of that moment.
`FifoScheduler` takes groups as they finish.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias, final

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.config.loader.parse import stored_values
from luyen.config.plan import has_partial_rollouts
from luyen.config.schema.run import RunConfig
from luyen.config.schema.trainer import TrainerConfig
from luyen.data.build import TrainData
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, prompt_requests
from luyen.runtime.generation import ReadyRollouts, RolloutFuture
from luyen.runtime.roles import Roles
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.progress import PROGRESS
from luyen.telemetry.rollout_codec import rollout_of, rollout_tree
from luyen.telemetry.spans import waiting_for

ParentDigest: TypeAlias = tuple[str, str | None]
"""Digest chain at submission, and the weights hash where the chain is empty (first step)."""
OpenJournal: TypeAlias = Callable[[int, str, ParentDigest | None], WorkJournal | None]
"""`(step, kind, origin)`: open a step's journal of a kind; `origin` None leaves it not begun."""
BeginJournal: TypeAlias = Callable[[WorkJournal | None, int, str, ParentDigest], None]
"""`(journal, step, kind, origin)`: begin a journal that was opened without an origin."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlot:
    """Position of a batch of rows in a run, and the version they were submitted with.

    Example:
        >>> BatchSlot(step=3, first=8, rows=(5, 6), version=2, origin=("", None)).rows
        (5, 6)
    """

    step: int
    """The step that they are generated for."""
    first: int
    """Number of groups of that step before them."""
    rows: tuple[int, ...]
    """Indices of their prompts."""
    version: int
    """Newest version of the weights at submission."""
    origin: ParentDigest
    """Digest chain and weights hash at submission."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "step": self.step,
            "first": self.first,
            "rows": list(self.rows),
            "version": self.version,
            "origin": list(self.origin),
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "BatchSlot":
        """What `as_json` gave."""
        chain, weights = tree["origin"]
        return cls(
            step=tree["step"],
            first=tree["first"],
            rows=tuple(tree["rows"]),
            version=tree["version"],
            origin=(chain, weights),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutHandle:
    """Submitted rollouts of one batch of rows.

    Example:
        >>> slot = BatchSlot(step=1, first=0, rows=(), version=0, origin=("", None))
        >>> RolloutHandle(slot=slot, sampled=ReadyRollouts([]), greedy=None, journal=None).is_done
        True
    """

    slot: BatchSlot
    """Position of the batch in the run."""
    sampled: RolloutFuture
    """Groups of sampled rollouts."""
    greedy: RolloutFuture | None
    """Greedy response to each prompt (ReMax baseline); None where the algorithm needs none."""
    journal: WorkJournal | None
    """Journal of the step's finished work; None: not journaled."""

    @property
    def is_done(self) -> bool:
        """Whether all rollouts are finished."""
        return self.sampled.done() and (self.greedy is None or self.greedy.done())

    def needs_other_weights(self, version: int) -> bool:
        """Whether some are unfinished and were submitted with another version than `version`."""
        return not self.is_done and self.slot.version != version

    def snapshot(self) -> dict[str, Any]:
        """JSON for a checkpoint, without waiting; an unfinished batch is regenerated on resume."""
        return self.as_json() if self.is_done else {**self.slot.as_json(), "drawn": None}

    def as_json(self) -> dict[str, Any]:
        """JSON for a checkpoint, with every rollout; waits for unfinished ones."""
        sampled = _rollout_trees(self.sampled)
        greedy = None if self.greedy is None else _rollout_trees(self.greedy)
        return {**self.slot.as_json(), "drawn": sampled, "greedy": greedy}


@final
class RolloutSubmitter:
    """Takes training rows from the sampler and submits their rollouts to the roles."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainData,
        roles: Roles,
        sampling: Sampling,
        *,
        has_baselines: bool,
        open_journal: OpenJournal,
        begin_journal: BeginJournal,
    ) -> None:
        """`open_journal` opens a step's journal, `begin_journal` begins it once known."""
        self.batch = config.data.train_batch_size
        """Groups per step (`data.train_batch_size`)."""
        self.roles = roles
        self.open_journal = open_journal
        self.begin_journal = begin_journal
        self._samples = config.actor_rollout_ref.rollout.n
        self._data = data
        self._sampling = sampling
        self._has_baselines = has_baselines
        self.sampling_hash = self._sampling_hash(config)
        """Hash of everything but the weights that decides what is generated."""
        self.cursor = 0
        """Rows taken from the sampler so far."""
        self.returned: tuple[int, ...] = ()
        """Rows that were taken and returned unused: they are taken first."""

    def _sampling_hash(self, config: RunConfig) -> str:
        turns = stored_values(config)["actor_rollout_ref"]["rollout"]["multi_turn"]
        del turns["on_unknown"]  # concerns resuming only, not what is generated
        sampling = {**asdict(self._sampling), "stop_ids": sorted(self._sampling.stop_ids)}
        del sampling["top_logprobs"]  # concerns what is reported only
        rows = self._data.train.fingerprint
        return hash_value([sampling, self._samples, self._has_baselines, turns, rows])

    def restore_rows(self, cursor: int, returned: tuple[int, ...]) -> None:
        """Continue with the rows after those that a checkpoint has taken and returned."""
        self.cursor, self.returned = cursor, returned

    def next_rows(self, count: int) -> tuple[int, ...]:
        """Take the next `count` rows: returned ones first, then new ones of the sampler."""
        again, self.returned = self.returned[:count], self.returned[count:]
        rows = self._data.sampler.take(self.cursor, count - len(again))
        self.cursor += len(rows)
        return (*again, *rows)

    def return_rows(self, rows: Sequence[int]) -> None:
        """Return rows that were not trained on; rows beyond the current dataset are dropped."""
        self.returned += tuple(row for row in rows if row < len(self._data.train.prompts))

    def submit(self, slot: BatchSlot, journal: WorkJournal | None) -> RolloutHandle:
        """Submit the rows of a slot; returns without waiting."""
        prompts = [self._data.train.prompts[i] for i in slot.rows]

        def generate(purpose: str, samples: int, sampling: Sampling) -> RolloutFuture:
            count, is_first = len(prompts) * samples, slot.first == 0
            PROGRESS.expect(purpose, slot.step, count, restart=is_first)
            return self.roles.submit(
                prompt_requests(prompts, step=slot.step, first=slot.first, samples=samples),
                sampling,
                purpose=purpose,
                version=slot.version,
                journal=journal,
            )

        greedy = replace(self._sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
        return RolloutHandle(
            slot=slot,
            sampled=generate("rollout", self._samples, self._sampling),
            greedy=generate("greedy", 1, greedy) if self._has_baselines else None,
            journal=journal,
        )

    def restore_handle(self, tree: Mapping[str, Any], journal: WorkJournal | None) -> RolloutHandle:
        """Inverse of `RolloutHandle.as_json`; a UserError where the rows have changed."""
        slot = BatchSlot.from_json(tree)
        greedy = tree["greedy"]
        return RolloutHandle(
            slot=slot,
            sampled=self._recorded_rollouts(slot, tree["drawn"]),
            greedy=None if greedy is None else self._recorded_rollouts(slot, greedy),
            journal=journal,
        )

    def _recorded_rollouts(
        self, slot: BatchSlot, trees: Sequence[Sequence[Mapping[str, Any]]]
    ) -> ReadyRollouts:
        prompts = self._data.train.prompts
        groups: list[Group] = []
        for row, some in zip(slot.rows, trees, strict=True):
            rollouts = tuple(rollout_of(tree) for tree in some)
            uids = {rollout.group.uid for rollout in rollouts}
            if row >= len(prompts) or uids - {prompts[row].uid}:
                why = f"row {row} is not the one that rollouts of the checkpoint answer"
                fix = "go on with the rows that the run began with"
                raise UserError("data.train_files", sorted(uids)[0], why, fix)
            groups.append(Group(prompt=prompts[row], rollouts=rollouts))
        return ReadyRollouts(groups)


def split_rows(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the saved JSON of a batch into one per row."""
    parts = {name: tree.get(name) for name in ("drawn", "greedy")}
    return [
        {
            **tree,
            "first": tree["first"] + i,
            "rows": [row],
            **{name: None if part is None else [part[i]] for name, part in parts.items()},
        }
        for i, row in enumerate(tree["rows"])
    ]


def _rollout_trees(pending: RolloutFuture) -> list[list[dict[str, Any]]]:
    return [[rollout_tree(one) for one in group.rollouts] for group in pending.result()]


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
