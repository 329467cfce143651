"""What a run writes: metrics, digests of each stage, rollouts, checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias, final

from torch import Tensor

from luyen.base.digests import BEGINNING, DigestFile, hash_parts, hash_value, link
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
from luyen.models.weights import tensor_digests
from luyen.runtime.offline import OfflineRoles
from luyen.runtime.roles import Roles, WeightDigests
from luyen.telemetry.callbacks import RunCallbacks
from luyen.telemetry.early_stopping import EarlyStopping
from luyen.telemetry.journal import WorkJournals
from luyen.telemetry.manifest import versions
from luyen.telemetry.metrics import CLOCK
from luyen.telemetry.rollout_codec import Pack, stream_bytes
from luyen.telemetry.rollout_files import Advantages, RecordedRollout, write_rollouts
from luyen.telemetry.sinks import MetricLog
from luyen.train import metric_names
from luyen.train.lineage import CheckpointNotes
from luyen.train.state import LoopState


def open_store(folder: Path, trainer: TrainerConfig) -> CheckpointStore:
    """The checkpoint store of a run, with the configured retention.

    Each checkpoint is noted as an artifact of the run; missing notes of a killed process are added.
    """
    best = BestMetric(count=trainer.keep_best, metric=trainer.best_metric, mode=trainer.best_mode)
    run = RunDirectory(folder.parent)
    if not run.exists:
        return CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, best=best)
    notes = CheckpointNotes(run, expanded(trainer.default_local_dir))
    store = CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, best=best, watcher=notes)
    notes.present([store.path(step) for step in store.list()])
    return store


def run_callbacks(directory: RunDirectory, trainer: TrainerConfig) -> RunCallbacks:
    """The callbacks of a run: its early stopping, where that is configured."""
    early_stopping = trainer.early_stopping
    if early_stopping.metric is None:
        return RunCallbacks(directory.root, None)
    rule = EarlyStopping(
        metric=early_stopping.metric,
        patience=early_stopping.patience,
        minimum_change=early_stopping.minimum_change,
        mode=early_stopping.mode,
    )
    return RunCallbacks(directory.root, rule)


def saves_in_background(trainer: TrainerConfig, where: Placement) -> bool:
    """Whether checkpoints are written while training goes on."""
    if trainer.async_save is None:
        return where.device == "cuda"
    return trainer.async_save


def checkpoint_facts(
    directory: RunDirectory, last_metrics: Mapping[str, float], *, chain: str | None
) -> dict[str, Any]:
    """Metadata of a checkpoint: run id, digest chain, versions, latest metrics.

    Times are left out, so that equal runs have equal metadata.
    """
    metrics = {name: value for name, value in last_metrics.items() if not name.startswith(CLOCK)}
    run = {"run_id": directory.run_id, "chain": chain, "versions": versions()}
    return {**run, METRICS: metrics}


def metrics_at(checkpoint: Checkpoint | None) -> dict[str, float]:
    """The last known value of each metric when a checkpoint was made; nothing without one."""
    metrics = checkpoint.facts.get(METRICS, {}) if checkpoint is not None else {}
    return {name: float(value) for name, value in metrics.items()}


def require_finite(broken: Sequence[str], *, step: int, newest: int | None) -> None:
    """A UserError if `broken`, the names of non-finite tensors, is not empty: nothing is saved."""
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
    """A UserError unless a checkpoint was made by the stage that resumes from it."""
    made = loop.get("stage", "rl")
    if made != stage:
        why = f"{path} was made by the stage `{made}`, which has another loop and optimizer"
        fix = "set another trainer.experiment_name, and begin with its exported model"
        raise UserError("trainer.stage", stage, why, fix)


DECLARED_METRICS = metric_names
"""Importing it declares every metric that a run writes."""
Address: TypeAlias = tuple[int, int, str, int]
"""`Rollout.key`."""
_WRITE_DELAY_S = 0.02
"""Delay of the writer thread, so that the loop submits the next rollouts first (GIL)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """What has been written of a run.

    Example:
        >>> RunHistory.read(LoopState(step=3, lacks_validation={})).step
        2
    """

    chain: str = BEGINNING
    """Digest chain of all written steps."""
    step: int = 0
    """The last step whose metrics and digest are written."""
    saved: int = 0
    """Step of the newest checkpoint; step 0 needs none."""
    validations: tuple[dict[str, float], ...] = ()
    """Metrics of the first validation of the run, and of those of this session."""
    has_validated_later: bool = False
    """Whether this session has validated after a step."""

    @classmethod
    def read(cls, state: LoopState) -> "RunHistory":
        """The history of a run at its checkpoint."""
        return cls(
            chain=state.chain,
            step=state.step - (state.lacks_validation is not None),
            saved=state.step,
            validations=(state.first_validation,) if state.first_validation else (),
        )

    @property
    def first_validation(self) -> dict[str, float]:
        """Metrics of the first validation; empty where there was none."""
        return self.validations[0] if self.validations else {}


@final
class Recorder:
    """Writes metrics, digests, rollouts and checkpoints of a run into its directory."""

    def __init__(
        self,
        directory: RunDirectory,
        log: MetricLog,
        store: CheckpointStore,
        digests: DigestFile,
        *,
        last_metrics: Mapping[str, float] | None = None,
        is_async: bool = False,
    ) -> None:
        """`last_metrics`: those before a resume; `is_async`: write checkpoints in background."""
        self.directory = directory
        self.log = log
        self.store = store
        self.digests = digests
        self.last_metrics = dict(last_metrics or {})
        """The last value of each metric."""
        self.history = RunHistory()
        """What has been written so far; only the commands below replace it."""
        self._writer = CheckpointWriter(store, is_async=is_async)
        self._files = BackgroundTask()
        self._is_awaited = Event()
        self._unvalidated = set[int]()
        """Steps of checkpoints that lack a validation, whose journal is still needed."""
        self.journals: WorkJournals | None = None
        """Journals of finished work; None: not journaled, lost work is repeated."""

    def resume(self, history: RunHistory) -> None:
        """Continue the history of a checkpoint."""
        self.history = history

    def open_journals(self, *, done: int) -> None:
        """Open the journals of finished work; those of steps up to `done` are dropped."""
        self.journals = WorkJournals(self.directory.journal, run_id=self.directory.run_id)
        self.journals.forget(done)

    def record_step(
        self, step: int, metrics: Mapping[str, float], stages: Mapping[str, str]
    ) -> None:
        """Write digest and metrics of a step; a UserError when the run directory is gone."""
        demand_claim(self.directory.root)
        named = {**stages, "metrics": metrics_stage(metrics)}
        digest = link(self.history.chain, step=step, stages=named)
        self.digests.write(digest)
        self.log.write(step, metrics)
        self.last_metrics |= metrics
        self.history = replace(self.history, chain=digest.chain, step=step)

    def rollouts(
        self,
        step: int,
        scored: Sequence[Rollout],
        used: Callable[[], Mapping[Address, Sequence[Advantages]]],
        baselines: Mapping[str, float] | None = None,
        measured: Callable[[], Mapping[Address, Sequence[Advantages]]] = dict,
    ) -> None:
        """Write all rollouts of a step, dropped ones included, in a background thread.

        The file is complete, or its error raised, before a checkpoint of the step is saved. `used`
        is called in that thread and returns the advantages of trained rollouts, `measured` the
        trainer's log-probabilities of their tokens; `baselines` are greedy rewards by group. A
        greedy rollout shares the address of a sample and is recorded only when it failed, so a
        failed rollout never gets advantages.
        """
        greedy_rewards = baselines or {}

        def records() -> list[RecordedRollout]:
            found, logps = used(), measured()
            return [
                _recorded(
                    r,
                    found.get(r.key) if r.fault is None else None,
                    greedy_rewards.get(str(r.group)),
                    logps.get(r.key) if r.fault is None else None,
                )
                for r in scored
            ]

        self._write_in_background(self.directory.rollouts(step), records, step=step)

    def validation(
        self, step: int, scored: Sequence[Rollout], metrics: Mapping[str, float]
    ) -> None:
        """Write the rollouts of a validation in a background thread; keep its metrics."""
        path = self.directory.rollouts(step, validation=True)
        self._write_in_background(path, lambda: [RecordedRollout(rollout=one) for one in scored])
        self.history = replace(
            self.history,
            validations=(*self.history.validations, dict(metrics)),
            has_validated_later=self.history.has_validated_later or step > 0,
        )

    def _write_in_background(
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

    def require_save(self) -> None:
        """Let the step be saved again: its checkpoint lacks the validation that follows."""
        self.history = replace(self.history, saved=-1)

    def save(self, state: LoopState, roles: Roles) -> None:
        """Save everything a resumed run needs; `poll` notices when the checkpoint is complete."""
        self.poll()
        self._finish_files()
        require_finite(roles.not_finite(), step=state.step, newest=self.store.latest())
        self.digests.sync()
        facts = checkpoint_facts(self.directory, self.last_metrics, chain=state.chain)
        awaits_validation = state.lacks_validation is not None
        self._unvalidated = (
            self._unvalidated | {state.step}
            if awaits_validation
            else self._unvalidated - {state.step}
        )
        roles.save(self._writer, state.step, loop=state.as_json(), facts=facts)
        self.poll()
        self.history = replace(self.history, saved=state.step)

    def save_stage(self, roles: OfflineRoles, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Save a checkpoint of an offline stage; `parts` are its plain state and `loop`."""
        loop = parts["loop"]
        step = int(loop["step"])
        self.poll()
        require_finite(roles.not_finite(), step=step, newest=self.store.latest())
        self.digests.sync()
        facts = checkpoint_facts(self.directory, self.last_metrics, chain=loop["chain"])
        roles.save(self._writer, step, parts=parts, facts=facts)
        self.poll()
        self.history = replace(self.history, saved=step)

    def poll(self) -> None:
        """Drop journals that completed checkpoints cover; raises errors of the writer."""
        for step in self._writer.finished():
            if self.journals is not None:
                self.journals.forget(step - (step in self._unvalidated))

    def close(self) -> None:
        """Flush and close all files; raises errors of the writer."""
        with ExitStack() as ending:
            ending.callback(release, self.directory.root)
            ending.callback(self.log.close)
            ending.callback(self.digests.close)
            if self.journals is not None:
                ending.callback(self.journals.close)
            self.flush()

    def flush(self) -> None:
        """Wait for files and checkpoints in progress; raises errors of their writers."""
        try:
            self._finish_files()
        finally:
            self._writer.wait()
            self.poll()


def load_checkpoint(folder: Path, roles: Roles) -> LoopState:
    """Load weights and optimizer state into the roles; returns the loop state."""
    loop = load_state(folder, "loop")
    require_stage(loop, "rl", folder)
    roles.load(folder)
    try:
        state = LoopState.from_json(loop)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid_loop(folder, f"{type(error).__name__}: {error}") from error
    if step_of(folder.name) not in (None, state.step):
        raise _invalid_loop(folder, f"`step` is {state.step}")
    return state


def _invalid_loop(folder: Path, why: str) -> UserError:
    fix = "resume from an earlier checkpoint"
    why = f"it is no state of a loop: {why}"
    return UserError("checkpoint", str(folder / "loop.json"), why, fix)


def advantages_by_rollout(
    rollouts: Sequence[Rollout], batch: PackedBatch
) -> dict[Address, list[Advantages]]:
    """Advantages by rollout and branch, None for tokens that are not trained on."""
    return stream_by_rollout(rollouts, batch, batch.streams["advantages"])


def stream_by_rollout(
    rollouts: Sequence[Rollout], batch: PackedBatch, values: Tensor
) -> dict[Address, list[Advantages]]:
    """Numbers per token by rollout and branch, None for tokens that are not trained on."""
    stream, mask = values.tolist(), batch.layout.mask.tolist()
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
    rollout: Rollout,
    used: Sequence[Advantages] | None,
    baseline: float | None,
    logps: Sequence[Advantages] | None,
) -> RecordedRollout:
    if used is None:
        return RecordedRollout(rollout=rollout, baseline=baseline)
    return RecordedRollout(
        rollout=rollout,
        advantages=used[-1],
        earlier=tuple(used[:-1]),
        baseline=baseline,
        trainer_logps=None if logps is None else logps[-1],
    )


# Digests of a step: one hash per stage. Nothing that depends on timing is hashed.

_ADVANTAGE_STREAMS = ("advantages", "returns", "is_weights")
_RATE = "/lr"


def rollout_stages(
    *,
    rollouts: Sequence[Rollout],
    baselines: Mapping[str, float],
    batch: PackedBatch,
    pack: Pack = stream_bytes,
) -> dict[str, str]:
    """Digests of the stages before the update; `rollouts` are all, dropped ones included."""
    ordered = sorted(rollouts, key=lambda r: r.key)
    credit = {name: batch.streams[name] for name in _ADVANTAGE_STREAMS if name in batch.streams}
    return {
        "prompts": hash_value(sorted({(r.group.draw, r.group.uid) for r in ordered})),
        "rollouts": hash_parts(_rollout_parts(ordered, pack)),
        "rewards": hash_value([[_rollout_score(r) for r in ordered], dict(baselines)]),
        "advantages": hash_value(tensor_digests(credit)),
    }


def update_stages(update: Mapping[str, float], digests: WeightDigests) -> dict[str, str]:
    """Digests of the update: its metrics without learning rates, moments and weights after it."""
    weights = hash_value(dict(digests.weights()))
    gradients = hash_value([update_without_lr(update), dict(digests.moments())])
    return {"gradients": gradients, "weights": weights}


def update_without_lr(update: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an update, without learning rates."""
    return {name: value for name, value in update.items() if not name.endswith(_RATE)}


def metrics_stage(metrics: Mapping[str, float]) -> str:
    """Digest of the metrics of a step, without times."""
    return hash_value({n: float(v) for n, v in metrics.items() if not n.startswith(CLOCK)})


def _rollout_parts(rollouts: Sequence[Rollout], pack: Pack) -> Iterator[bytes]:
    """Bytes to hash: facts of all rollouts, then the token streams of each branch.

    `hash_parts` hashes part boundaries, so branches need no separators.
    """
    yield hash_value([_rollout_facts(rollout) for rollout in rollouts]).encode()
    # A rollout has the streams of its last branch; `branches` would copy them.
    for rollout in rollouts:
        for branch in (*rollout.earlier, rollout):
            yield pack(branch)


def _rollout_facts(rollout: Rollout) -> list[Any]:
    """Facts of a rollout besides tokens; the message of a fault may vary and is left out."""
    calls = [_tool_call(call) for call in rollout.calls]
    faulty = rollout.fault is not None
    return [*rollout.key, len(rollout.earlier), rollout.stop, faulty, rollout.text, calls]


def _tool_call(call: ToolCall) -> list[Any]:
    """A call and the result the policy read.

    Duration, retries and error message may vary and are left out.
    """
    return [call.turn, call.name, dict(call.arguments), call.status, call.result, call.reward]


def _rollout_score(rollout: Rollout) -> list[Any]:
    score = rollout.score
    return [*rollout.key, None if score is None else _score_tree(score), rollout.given]


def _score_tree(score: Score) -> list[Any]:
    """A score with its components; error messages may vary and are left out."""
    parts = [_score_tree(part) for part in score.parts]
    failed = score.error is not None
    facts = [score.name, score.value, score.weight, parts, failed, score.by_turn]
    made = [score.raw, score.gated, score.combine]
    if score.turned:
        return [*facts, *made, "turned"]
    return facts if made == [None, False, "sum"] else facts + made
