"""What a run writes: metrics, digests of each stage, rollouts, checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias, final

from luyen.base.digests import DigestFile, StepDigest, hash_parts, hash_value
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.records import Rollout, Score, ToolCall
from luyen.base.run_lock import demand_claim, release
from luyen.base.rundir import RunDirectory, step_of
from luyen.checkpoint.store import METRICS, BestMetric, Checkpoint, CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.checkpoint.writer import BackgroundTask, CheckpointWriter
from luyen.config.plan import Placement
from luyen.config.schema.trainer import TrainerConfig
from luyen.engine.batch import PackedBatch
from luyen.models.trained_weights import tensor_digests
from luyen.runtime.roles import Roles, WeightDigests
from luyen.telemetry.journal import WorkJournals
from luyen.telemetry.manifest import versions
from luyen.telemetry.metrics import CLOCK
from luyen.telemetry.rollout_codec import Pack, stream_bytes
from luyen.telemetry.rollout_files import Advantages, RecordedRollout, write_rollouts
from luyen.telemetry.sinks import MetricLog
from luyen.train import metric_names
from luyen.train.lineage import CheckpointNotes
from luyen.train.state import LoopState

# What a run saves and keeps: how its configuration has it, and never weights that are broken.


def open_store(folder: Path, trainer: TrainerConfig) -> CheckpointStore:
    """The checkpoints of a run, with those staying that the configuration wants to keep.

    Each is noted as an artifact of the run, also one that a killed process had no time to note.
    """
    best = BestMetric(count=trainer.keep_best, metric=trainer.best_metric, mode=trainer.best_mode)
    run = RunDirectory(folder.parent)
    if not run.exists:
        return CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, best=best)
    notes = CheckpointNotes(run, expanded(trainer.default_local_dir))
    store = CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, best=best, watcher=notes)
    notes.present([store.path(step) for step in store.list()])
    return store


def saves_in_background(trainer: TrainerConfig, where: Placement) -> bool:
    """Whether checkpoints are written while training goes on."""
    if trainer.async_save is None:
        return where.device == "cuda"
    return trainer.async_save


def checkpoint_facts(
    directory: RunDirectory, known: Mapping[str, float], *, chain: str | None
) -> dict[str, Any]:
    """What is noted beside a checkpoint: the run, how far it was, and what it measured last.

    Times are left out, so that equal runs note equal facts.
    """
    metrics = {name: value for name, value in known.items() if not name.startswith(CLOCK)}
    noted = {"run_id": directory.run_id, "chain": chain, "versions": versions()}
    return {**noted, METRICS: metrics}


def metrics_at(checkpoint: Checkpoint | None) -> dict[str, float]:
    """The last known value of each metric when a checkpoint was made; nothing without one."""
    noted = checkpoint.facts.get(METRICS, {}) if checkpoint is not None else {}
    return {name: float(value) for name, value in noted.items()}


def require_finite(broken: Sequence[str], *, step: int, newest: int | None) -> None:
    """A UserError when a weight, a master or a moment is NaN or infinite: it is never saved.

    `broken` are the names of such tensors.
    """
    if not broken:
        return
    more = f", and {len(broken) - 1} more tensors" if len(broken) > 1 else ""
    last = f"the last good checkpoint is step {newest}" if newest is not None else "there is none"
    raise UserError(
        "weights",
        broken[0],
        f"it holds NaN or infinity after step {step}{more}, so this step is not saved; {last}",
        "lower the learning rate (actor_rollout_ref.actor.optim.lr) or clip_grad, and run again "
        "with trainer.resume_mode=auto to go on from there",
    )


def require_stage(loop: Mapping[str, Any], stage: str, path: Path) -> None:
    """A UserError unless a checkpoint's loop is of the stage that is to go on from it."""
    made = loop.get("stage", "rl")
    if made != stage:
        why = f"{path} was made by the stage `{made}`, whose loop and optimizer are others"
        fix = "set another trainer.experiment_name, and begin with its exported model"
        raise UserError("trainer.stage", stage, why, fix)


DECLARED_METRICS = metric_names
"""Importing it declares every number a run writes."""
Address: TypeAlias = tuple[int, int, str, int]
"""`Rollout.key`."""
_WRITE_DELAY_S = 0.02
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
        self._files = BackgroundTask()
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
            self._is_awaited.wait(_WRITE_DELAY_S)
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
        require_finite(roles.not_finite(), step=state.step, newest=self.store.latest())
        self.digests.sync()
        facts = checkpoint_facts(self.directory, self.known, chain=state.chain)
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


def load_checkpoint(folder: Path, roles: Roles) -> LoopState:
    """Weights and optimizer state into the roles; the loop's own state as a record."""
    loop = load_state(folder, "loop")
    require_stage(loop, "rl", folder)
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


# What a step did, as one hash per stage. What depends on the clock is left out of every stage.

_ADVANTAGE_STREAMS = ("advantages", "returns", "is_weights")
_RATE = "/lr"


def rollout_stages(
    *,
    rollouts: Sequence[Rollout],
    baselines: Mapping[str, float],
    batch: PackedBatch,
    pack: Pack = stream_bytes,
) -> dict[str, str]:
    """The stages of a step that come before it is learned from.

    `rollouts` are all that were drawn, those that were left out included.
    """
    ordered = sorted(rollouts, key=lambda r: r.key)
    credit = {name: batch.streams[name] for name in _ADVANTAGE_STREAMS if name in batch.streams}
    return {
        "prompts": hash_value(sorted({(r.group.draw, r.group.uid) for r in ordered})),
        "rollouts": hash_parts(_rollout_parts(ordered, pack)),
        "rewards": hash_value([[_rollout_score(r) for r in ordered], dict(baselines)]),
        "advantages": hash_value(tensor_digests(credit)),
    }


def update_stages(update: Mapping[str, float], held: WeightDigests) -> dict[str, str]:
    """The stages of what was learned.

    `update` is what the optimizer steps measured, and `held` what they left. The learning rate is
    no property of a gradient, and is left out.
    """
    weights = hash_value(dict(held.weights()))
    gradients = hash_value([update_without_lr(update), dict(held.moments())])
    return {"gradients": gradients, "weights": weights}


def update_without_lr(update: Mapping[str, float]) -> dict[str, float]:
    """What an optimizer step measured, without its learning rate."""
    return {name: value for name, value in update.items() if not name.endswith(_RATE)}


def metrics_stage(metrics: Mapping[str, float]) -> str:
    """The hash of what a step measured."""
    return hash_value({n: float(v) for n, v in metrics.items() if not n.startswith(CLOCK)})


def _rollout_parts(rollouts: Sequence[Rollout], pack: Pack) -> Iterator[bytes]:
    """Every token of the rollouts with its origin, and what tools answered on the way.

    Where one part ends and the next begins counts, so branches need no marks between them.
    """
    yield hash_value([_rollout_facts(rollout) for rollout in rollouts]).encode()
    # A rollout has the streams of its last branch; `branches` would copy them.
    for rollout in rollouts:
        for branch in (*rollout.earlier, rollout):
            yield pack(branch)


def _rollout_facts(rollout: Rollout) -> list[Any]:
    """What a rollout is besides its tokens; the wording of a fault may vary, and is left out."""
    calls = [_tool_call(call) for call in rollout.calls]
    faulty = rollout.fault is not None
    return [*rollout.key, len(rollout.earlier), rollout.stop, faulty, rollout.text, calls]


def _tool_call(call: ToolCall) -> list[Any]:
    """A call and what the policy read about it; how long it took and how often it was tried vary.

    So does the wording of an error, which may name an address or a time.
    """
    return [call.turn, call.name, dict(call.arguments), call.status, call.result, call.reward]


def _rollout_score(rollout: Rollout) -> list[Any]:
    score = rollout.score
    return [*rollout.key, None if score is None else _score_tree(score), rollout.given]


def _score_tree(score: Score) -> list[Any]:
    """A score with its parts; why one is missing is told in words, which may vary."""
    parts = [_score_tree(part) for part in score.parts]
    failed = score.error is not None
    step_report = [score.name, score.value, score.weight, parts, failed, score.by_turn]
    made = [score.raw, score.gated, score.combine]
    if score.turned:
        return [*step_report, *made, "turned"]
    return step_report if made == [None, False, "sum"] else step_report + made
