"""The learner of a replay, rebuilt as it was before a step and checked against digests."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from luyen.algorithms.advantages.grouping import kl_drift
from luyen.algorithms.objective import Objective
from luyen.base.digests import STAGES
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.config.schema.run import RunConfig
from luyen.config.schema.trainer import ProfileConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import PackedBatch
from luyen.engine.logprobs import score
from luyen.engine.token_trace import TokenTrace, trace_tokens
from luyen.pipeline.policy_loading import device_for
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.in_process import local_roles
from luyen.runtime.roles import Roles
from luyen.runtime.training import training_engines
from luyen.runtime.worker import TrainWorker
from luyen.studio.replay.record import RecordedStep, ReplayRecord
from luyen.studio.token_file import TokenNumbers
from luyen.train.batch import batch_order, pack_groups, parity_metrics
from luyen.train.builders.roles import (
    build_engine,
    build_generation,
    build_worker,
    micro_batching,
)
from luyen.train.builders.run import learning_rules, total_steps
from luyen.train.builders.setup import import_plugins, load_run_tokenizer
from luyen.train.monitor import StepProfiler
from luyen.train.record import (
    load_checkpoint,
    rollout_stages,
    stream_by_rollout,
    update_stages,
)
from luyen.train.state import LearningRules, LoopState, RunProgress
from luyen.train.update import (
    BeforeUpdate,
    LearningContext,
    group_advantages,
    prepare_batch,
    update_roles,
)

PLACE = "place"
"""Stream with the index of each token in the batch of the step, kept through mini-batches."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTrace:
    """Per-token trace of one optimizer step, taken before the step.

    Example:
        >>> StepTrace(place=torch.tensor([4, 5]), explained=None).place.tolist()
        [4, 5]
    """

    place: Tensor
    """Index of each token in the batch of the step."""
    explained: TokenTrace
    """Loss, weight, ratio and gradient of each token."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnerSnapshot:
    """All state that determines the next update, at one point of the run.

    Example:
        >>> LearnerSnapshot(loop=LoopState(step=3), roles={}).loop.step
        3
    """

    loop: LoopState
    """Progress of the loop."""
    roles: dict[str, Any]
    """Weights and optimizer state, copied."""


@final
class ReplayLearner:
    """Trains on recorded rollouts, from the state of a run before a step."""

    def __init__(
        self,
        *,
        config: RunConfig,
        roles: Roles,
        worker: TrainWorker,
        engine: RolloutEngine,
        rules: LearningRules,
        tokenizer: Tokenizer,
        steps: int,
    ) -> None:
        """`worker` and `engine` are those of the roles."""
        self.config = config
        self.roles = roles
        self.worker = worker
        self.engine = engine
        self.tokenizer = tokenizer
        self.learning = LearningContext(
            config=config,
            roles=roles,
            rules=rules,
            profiler=StepProfiler(ProfileConfig(), RunDirectory(".")),
            phase=lambda _: nullcontext(),
            total_steps=steps,
        )
        """What batches, advantages and updates are computed with."""
        self._progress = RunProgress.begin(rules)

    @property
    def progress(self) -> RunProgress:
        """What the steps so far have changed."""
        return self._progress

    def advance(self, progress: RunProgress) -> None:
        """Take the progress after a step."""
        self._progress = progress

    def resume(self, state: LoopState) -> None:
        """Take the progress of a checkpoint, whose weights the roles have loaded."""
        self._progress = self._progress.restored(state)

    def snapshot(self) -> LearnerSnapshot:
        """A copy of the current state, for `restore`."""
        roles = copy.deepcopy(self.worker.state())
        return LearnerSnapshot(loop=self._progress.loop_state(), roles=roles)

    def restore(self, snapshot: LearnerSnapshot) -> None:
        """Restore a snapshot: weights, optimizer state and coefficients."""
        self.worker.load_state(snapshot.roles)
        self.roles.forget_weights()
        self.resume(snapshot.loop)


def open_learner(config: RunConfig, *, rows: int | None) -> ReplayLearner:
    """A learner with the initial state of a run, on the device of the run if it is available.

    `rows` is the number of training rows; None: unknown, which is an error if the learning rate
    schedule depends on it.
    """
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    rules = learning_rules(config)
    renderer = Renderer(tokenizer, template_kwargs=config.data.apply_chat_template_kwargs)
    steps = _total_steps(config, rows)
    device = device_for(config)
    worker = build_worker(config, tokenizer, rules.needs, device)
    engine = build_engine(config, worker.actor.policy, tokenizer)
    roles = local_roles(
        worker=worker,
        engine=engine,
        generation=build_generation(config, None, renderer),
        micro_batching=micro_batching(config, rules.needs),
    )
    return ReplayLearner(
        config=config,
        roles=roles,
        worker=worker,
        engine=engine,
        rules=rules,
        tokenizer=tokenizer,
        steps=steps,
    )


def with_token_index(batch: PackedBatch) -> PackedBatch:
    """The batch with a stream of token indices."""
    count = batch.tokens.numel()
    return batch.with_streams(**{PLACE: torch.arange(count, device=batch.tokens.device)})


def _total_steps(config: RunConfig, rows: int | None) -> int:
    if rows is not None or config.trainer.total_training_steps is not None:
        return total_steps(config, rows or 0)
    schedules = (config.actor_rollout_ref.actor.optim, config.critic.optim)
    if any(_depends_on_the_end(optim) for optim in schedules):
        why = "the learning rate follows the number of steps, and the run does not say how many "
        why += "rows it had: an older version began it"
        fix = "replay a run of this version, or one with trainer.total_training_steps"
        raise UserError("trainer.total_training_steps", None, why, fix)
    return 1


def _depends_on_the_end(optim: OptimConfig) -> bool:
    warms_up = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    return warms_up or optim.lr_scheduler_type != "constant"


# Replay of consecutive steps, each compared with the recorded digests.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Digest comparison of a replayed step.

    Example:
        >>> StepCheck(step=3, equal=("prompts",), unequal=("weights",)).parted_at
        'weights'
    """

    step: int
    """The step."""
    equal: tuple[str, ...]
    """Stages whose digests match."""
    unequal: tuple[str, ...]
    """Stages whose digests differ, in execution order."""

    @property
    def parted_at(self) -> str | None:
        """The first stage that differs: the later ones follow from it."""
        return self.unequal[0] if self.unequal else None


Watch: TypeAlias = Callable[[int, int, StepCheck | None], None]
"""Progress callback: `(steps done, total steps, check of the last step)`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedStep:
    """Result of a replayed step.

    Example:
        >>> LearnedStep(batch=None, metrics={"actor/pg_loss": 0.5}, stages={}).metrics
        {'actor/pg_loss': 0.5}
    """

    batch: PackedBatch
    """The batch with its advantages."""
    metrics: Mapping[str, float]
    """Metrics of advantages and update."""
    stages: Mapping[str, str]
    """Digest of each stage but the metrics."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RebuiltRun:
    """A learner in the state before a step.

    Example:
        >>> RebuiltRun(run=None, start="the beginning", checks=()).start
        'the beginning'
    """

    run: ReplayLearner
    """The learner."""
    start: str
    """Where the replay started: a checkpoint or the beginning."""
    checks: tuple[StepCheck, ...]
    """Checks of the steps replayed up to here."""


def rebuild(record: ReplayRecord, step: int, watch: Watch) -> RebuiltRun:
    """Rebuild the state before a step: the nearest checkpoint, then the recorded batches after it.

    `watch` is called after each step; its total includes the wanted step.
    """
    record.demand(step)
    checkpoint = record.checkpoint_before(step)
    first = 1 if checkpoint is None else checkpoint.step + 1
    watch(0, step - first + 1, None)
    steps = {number: record.directory.rollouts(number) for number in range(first, step + 1)}
    for number, path in steps.items():
        if not path.is_file():
            record.step(number)  # raises the UserError before any work is done
    run = open_learner(record.config(), rows=record.rows())
    start = "the beginning"
    if checkpoint is not None:
        start = f"checkpoint {checkpoint.path.name}"
        run.resume(load_checkpoint(checkpoint.path, run.roles))
    checks: list[StepCheck] = []
    for number in range(first, step):
        recorded = record.step(number)
        checks.append(check_step(record, number, learn_step(run, recorded)))
        watch(len(checks), step - first + 1, checks[-1])
    return RebuiltRun(run=run, start=start, checks=tuple(checks))


def learn_step(
    run: ReplayLearner, recorded: RecordedStep, *, before: BeforeUpdate | None = None
) -> LearnedStep:
    """Train on the recorded rollouts of a step; nothing is generated or scored.

    `before` is called before each optimizer step of the policy.
    """
    learning, progress = run.learning, run.progress
    groups, baselines = recorded.groups, recorded.baselines
    if learning.rules.needs.baselines:
        _demand_baselines(recorded)
    batch = prepare_batch(learning, groups)
    kl_coef = progress.kl_controller.kl_coef
    credited = group_advantages(learning, batch, groups, baselines, kl_coef=kl_coef)
    updated = update_roles(learning, with_token_index(credited.batch), progress, before=before)
    metrics = {**parity_metrics(batch, learning.rules.needs), **updated.metrics}
    stages = {
        **rollout_stages(rollouts=recorded.rollouts, baselines=baselines, batch=credited.batch),
        **update_stages(metrics, run.roles.weight_digests()),
    }
    found = {**credited.metrics, **metrics}
    if credited.kl is not None:
        progress = progress.with_kl(credited.kl, len(batch_order(groups)))
        found["actor/ref_kl_slope"] = kl_drift(progress.kl_history).slope
    run.advance(
        replace(
            progress,
            step=progress.step + 1,
            version=progress.version + 1,
            skipped=updated.skipped,
            entropy_controller=updated.entropy_controller,
        )
    )
    return LearnedStep(batch=credited.batch, metrics=found, stages=stages)


def explain_step(run: ReplayLearner, recorded: RecordedStep) -> tuple[LearnedStep, list[StepTrace]]:
    """Train on a recorded step; every optimizer step of the policy is traced before it is made."""
    traces: list[StepTrace] = []
    actor = run.worker.actor
    if not isinstance(actor, ActorEngine):
        why = "its learner cannot be traced token by token"
        raise UserError(training_engines.field, type(actor).__name__, why, "trace with `single`")

    def trace(batch: PackedBatch, objective: Objective, seed: int) -> None:
        explained = trace_tokens(actor, batch, objective, seed=seed)
        traces.append(StepTrace(place=batch.streams[PLACE], explained=explained))

    return learn_step(run, recorded, before=trace), traces


def token_numbers(run: ReplayLearner, recorded: RecordedStep) -> list[TokenNumbers]:
    """Log-probability and entropy of every token under the current weights, by a pass of its own.

    Of the last branch of each rollout, as files of rollouts have them.
    """
    groups, actor = recorded.groups, run.worker.actor
    assert isinstance(actor, ActorEngine), "replay builds the engine `single`"
    replays = run.learning.rules.needs.replays_routes
    batch = pack_groups(groups, run.roles.device, with_rewards=False, replays_routes=replays)
    rollouts = batch_order(groups)
    scored = score(actor.policy, batch, actor.passes, temperature=actor.temperature, entropy=True)
    logps, entropies = (
        stream_by_rollout(rollouts, batch, scored[name]) for name in ("logp", "entropy")
    )
    return [
        TokenNumbers(
            group=str(rollout.group),
            sample=rollout.sample,
            tokens=rollout.tokens,
            trainer_logps=logps[rollout.key][-1],
            entropy=entropies[rollout.key][-1],
        )
        for rollout in rollouts
    ]


def check_step(record: ReplayRecord, step: int, learned: LearnedStep) -> StepCheck:
    """Compare the stages of a step with the digests of the run."""
    return check_stages(record, step, learned.stages)


def check_stages(record: ReplayRecord, step: int, stages: Mapping[str, str]) -> StepCheck:
    """Compare digests of a step with those of the run."""
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
