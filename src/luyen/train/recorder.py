"""What a run leaves behind: metrics, digests, rollouts, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import TypeAlias, final

from luyen.base.claims import demand_claim, release
from luyen.base.digests import DigestFile, StepDigest
from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.base.rundir import RunDirectory, step_of
from luyen.checkpoint.aside import Aside
from luyen.checkpoint.background import CheckpointWriter
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.engine.batch import PackedBatch
from luyen.runtime.roles import Roles
from luyen.telemetry.journal import WorkJournals
from luyen.telemetry.rollout_files import Advantages, RecordedRollout, write_rollouts
from luyen.telemetry.sinks import MetricLog
from luyen.train import metric_names
from luyen.train.saving import demand_finite, demand_stage, facts_of
from luyen.train.state import LoopState

METRICS = metric_names
"""Importing it declares every number a run writes."""
Address: TypeAlias = tuple[int, int, str, int]
"""`Rollout.key`."""
_LATER_S = 0.02
"""The loop goes first and asks for the next rollouts: threads of Python only take turns."""


@final
class Recorder:
    """Writes into one run directory."""

    def __init__(
        self,
        directory: RunDirectory,
        log: MetricLog,
        store: CheckpointStore,
        digests: DigestFile,
        *,
        known: Mapping[str, float] | None = None,
        is_async: bool = False,
    ) -> None:
        """`known` is what was measured before; `is_async` writes checkpoints beside training."""
        self.directory = directory
        self.log = log
        self.store = store
        self.digests = digests
        self.known = dict(known or {})
        """The last value of each metric."""
        self._writer = CheckpointWriter(store, is_async=is_async)
        self._files = Aside()
        self._is_awaited = Event()
        self._open = set[int]()
        """Steps of checkpoints that lack a validation: its journal is still needed."""
        self.journals: WorkJournals | None = None
        """Where finished work is written down at once; None: nowhere, it is done again."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of numbers; a UserError when the run directory is not there any more."""
        demand_claim(self.directory.root)
        self.log.write(step, metrics)
        self.known |= metrics

    def digest(self, digest: StepDigest) -> None:
        """One line of hashes."""
        self.digests.write(digest)

    def rollouts(
        self,
        step: int,
        judged: Sequence[Rollout],
        used: Callable[[], Mapping[Address, Sequence[Advantages]]],
        baselines: Mapping[str, float] | None = None,
    ) -> None:
        """Every rollout of a step, those that were left out included, in a thread of its own.

        The file is there when a checkpoint of the step is, and what stops it is raised by then.
        `used` is asked in that thread for the advantages of what the step learned from.
        `baselines` are greedy rewards by group. The greedy answer itself is drawn at the address of
        a sample, and recorded only when it broke, so what broke is never what was used.
        """
        known = baselines or {}

        def records() -> list[RecordedRollout]:
            found = used()
            return [
                _recorded(r, found.get(r.key) if r.fault is None else None, known.get(str(r.group)))
                for r in judged
            ]

        self._write_aside(self.directory.rollouts(step), records, step=step)

    def validation(self, step: int, judged: Sequence[Rollout]) -> None:
        """The rollouts of a validation, as those of a step."""
        path = self.directory.rollouts(step, validation=True)
        self._write_aside(path, lambda: [RecordedRollout(rollout=one) for one in judged])

    def _write_aside(
        self,
        path: Path,
        records: Callable[[], list[RecordedRollout]],
        *,
        step: int | None = None,
    ) -> None:
        def write() -> None:
            self._is_awaited.wait(_LATER_S)
            write_rollouts(path, records(), step=step)

        self._finish_files()
        self._is_awaited.clear()
        self._files.begin(write)

    def _finish_files(self) -> None:
        self._is_awaited.set()
        self._files.wait()

    def save(self, state: LoopState, roles: Roles) -> None:
        """A checkpoint of everything a resumed run needs; `poll` says when it has come to be."""
        self.poll()
        self._finish_files()
        demand_finite(roles.not_finite(), step=state.step, newest=self.store.latest())
        self.digests.sync()
        facts = facts_of(self.directory, self.known, chain=state.chain)
        is_open = state.lacks_validation is not None
        self._open = self._open | {state.step} if is_open else self._open - {state.step}
        roles.save(self._writer, state.step, loop=state.as_json(), facts=facts)
        self.poll()

    def poll(self) -> None:
        """Forget the work that a new checkpoint holds; raises what stopped one from being made."""
        for step in self._writer.finished():
            if self.journals is not None:
                self.journals.forget(step - (step in self._open))

    def close(self) -> None:
        """Finish every file, the checkpoint in progress first; raises what stopped it."""
        with ExitStack() as ending:
            ending.callback(release, self.directory.root)
            ending.callback(self.log.close)
            ending.callback(self.digests.close)
            if self.journals is not None:
                ending.callback(self.journals.close)
            self.settle()

    def settle(self) -> None:
        """Return when no file and no checkpoint is in progress; raises what stopped one."""
        try:
            self._finish_files()
        finally:
            self._writer.wait()
            self.poll()


def restore(folder: Path, roles: Roles) -> LoopState:
    """Weights and optimizer state into the roles; the loop's own state as a record."""
    loop = load_state(folder, "loop")
    demand_stage(loop, "rl", folder)
    roles.load(folder)
    try:
        state = LoopState.from_json(loop)
    except (KeyError, TypeError, ValueError) as error:
        raise _odd_loop(folder, f"{type(error).__name__}: {error}") from error
    if step_of(folder.name) not in (None, state.step):
        raise _odd_loop(folder, f"`step` is {state.step}")
    return state


def _odd_loop(folder: Path, why: str) -> UserError:
    fix = "resume from an earlier checkpoint"
    why = f"it is no state of a loop: {why}"
    return UserError("checkpoint", str(folder / "loop.json"), why, fix)


def advantages_by_rollout(
    rollouts: Sequence[Rollout], batch: PackedBatch
) -> dict[Address, list[Advantages]]:
    """Advantage of each trainable token by rollout and branch, for the record."""
    stream, mask = batch.streams["advantages"].tolist(), batch.layout.mask.tolist()
    found: dict[Address, list[Advantages]] = {}
    start = 0
    for rollout in rollouts:
        for part in (*rollout.earlier, rollout):
            end = start + len(part.tokens)
            pairs = zip(stream[start:end], mask[start:end], strict=True)
            row = tuple(value if trains else None for value, trains in pairs)
            found.setdefault(rollout.key, []).append(row)
            start = end
    assert start == len(stream), "the batch holds other rollouts than these"
    return found


def _recorded(
    rollout: Rollout, used: Sequence[Advantages] | None, baseline: float | None
) -> RecordedRollout:
    if used is None:
        return RecordedRollout(rollout=rollout, baseline=baseline)
    return RecordedRollout(
        rollout=rollout, advantages=used[-1], earlier=tuple(used[:-1]), baseline=baseline
    )
