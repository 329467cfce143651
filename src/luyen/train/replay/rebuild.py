"""Recorded steps done again, one after the other, each held against what the run wrote of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from luyen.algorithms.group_metrics import kl_drift
from luyen.base.digests import STAGES
from luyen.base.errors import UserError
from luyen.engine.batch import PackedBatch
from luyen.train.annotate import parity_metrics
from luyen.train.digests import drawn_stages, learned_stages
from luyen.train.learn import annotated, credit_groups, update_roles
from luyen.train.recorder import restore
from luyen.train.replay.learner import Replaying, numbered, open_learner
from luyen.train.replay.record import RecordedStep, RunRecord
from luyen.train.samples import in_order


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """A step that was done again, and the stages in which it is what the run did.

    Example:
        >>> StepCheck(step=3, equal=("prompts",), unequal=("weights",)).parted_at
        'weights'
    """

    step: int
    """The step."""
    equal: tuple[str, ...]
    """Stages whose digests are those of the run."""
    unequal: tuple[str, ...]
    """Stages whose digests are not, in the order in which they happen."""

    @property
    def parted_at(self) -> str | None:
        """The first stage that differs: the later ones follow from it."""
        return self.unequal[0] if self.unequal else None


Watch: TypeAlias = Callable[[int, int, StepCheck | None], None]
"""Hears `(steps done, steps to do, the one just done)`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learned:
    """What a step did.

    Example:
        >>> Learned(batch=None, metrics={"actor/pg_loss": 0.5}, stages={}).metrics
        {'actor/pg_loss': 0.5}
    """

    batch: PackedBatch
    """The batch with its advantages."""
    metrics: Mapping[str, float]
    """Everything that credit and update measured."""
    stages: Mapping[str, str]
    """Digest of each stage but the metrics."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rebuilt:
    """A run as it stood before a step.

    Example:
        >>> Rebuilt(run=None, start="the beginning", checks=()).start
        'the beginning'
    """

    run: Replaying
    """What goes on from there."""
    start: str
    """What the steps before were done again from."""
    checks: tuple[StepCheck, ...]
    """Those steps."""


def rebuild(record: RunRecord, step: int, watch: Watch) -> Rebuilt:
    """The run before a step: the nearest checkpoint, and the recorded batches after it.

    `watch` hears of each step as it is done, the wanted one counted among those to do.
    """
    record.demand(step)
    checkpoint = record.checkpoint_before(step)
    first = 1 if checkpoint is None else checkpoint.step + 1
    watch(0, step - first + 1, None)
    steps = {number: record.directory.rollouts(number) for number in range(first, step + 1)}
    for number, path in steps.items():
        if not path.is_file():
            record.step(number)  # says what is missing before any work is done
    run = open_learner(record.config(), rows=record.rows())
    start = "the beginning"
    if checkpoint is not None:
        start = f"checkpoint {checkpoint.path.name}"
        run.go_on_from(restore(checkpoint.path, run.roles))
    checks: list[StepCheck] = []
    for number in range(first, step):
        recorded = record.step(number)
        checks.append(check(record, number, learn_step(run, recorded)))
        watch(len(checks), step - first + 1, checks[-1])
    return Rebuilt(run=run, start=start, checks=tuple(checks))


def learn_step(run: Replaying, recorded: RecordedStep) -> Learned:
    """Learn from the recorded rollouts of a step. Nothing is generated, and nothing is judged."""
    groups, baselines = recorded.groups, recorded.baselines
    if run.needs.baselines:
        _demand_baselines(recorded)
    batch = annotated(run, groups)
    credited = credit_groups(run, batch, groups, baselines)
    update = update_roles(run, numbered(credited.batch), recorded.step)
    metrics = {**parity_metrics(batch, run.needs), **update}
    stages = {
        **drawn_stages(rollouts=recorded.rollouts, baselines=baselines, batch=credited.batch),
        **learned_stages(metrics, run.roles.describe()),
    }
    found = {**credited.metrics, **metrics}
    if credited.kl is not None:
        run.follow_kl(credited.kl, len(in_order(groups)))
        found["actor/ref_kl_slope"] = kl_drift(run.kl_history).slope
    run.step += 1
    run.version += 1
    return Learned(batch=credited.batch, metrics=found, stages=stages)


def check(record: RunRecord, step: int, learned: Learned) -> StepCheck:
    """The stages of a step held against the digests of the run."""
    return check_stages(record, step, learned.stages)


def check_stages(record: RunRecord, step: int, stages: Mapping[str, str]) -> StepCheck:
    """Digests of a step held against those of the run."""
    written = record.digests[step].stages if step in record.digests else {}
    both = [stage for stage in STAGES if stage in written and stage in stages]
    same = {stage: written[stage] == stages[stage] for stage in both}
    return StepCheck(
        step=step,
        equal=tuple(stage for stage in both if same[stage]),
        unequal=tuple(stage for stage in both if not same[stage]),
    )


def _demand_baselines(recorded: RecordedStep) -> None:
    known = recorded.baselines
    for group in recorded.groups:
        name = str(group.rollouts[0].group)
        if name not in known:
            why = f"the estimator compares with greedy rewards, and the record has none of {name}"
            fix = "replay a run that trained with such an estimator, in this version or a later one"
            raise UserError("algorithm.adv_estimator", None, why, fix)
