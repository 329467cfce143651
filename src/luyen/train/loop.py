"""The RL loop: generate, score, prepare the batch, advantages, update, publish, record, save.

Where replicas generate remotely, the next step is prefetched: its prompts are submitted while this
step updates, and generation starts as soon as the new weights are published. Generation depends on
the weights alone, so a prefetched step equals one that is submitted later.
"""

from luyen.base.errors import UserError
from luyen.data.samplers import AdaptiveSampler
from luyen.rollout.protocol import rollout_engines
from luyen.runtime.roles import WeightDigests
from luyen.train.batch import parity_metrics
from luyen.train.metrics import StepReport, finish_step
from luyen.train.rollouts import OrderedScheduler
from luyen.train.run import OnlineRun, weights_hash
from luyen.train.scoring import generate_and_score
from luyen.train.update import group_advantages, prepare_batch, start_update
from luyen.train.validation import validate


def train_online(run: OnlineRun) -> None:
    """Train until all steps are done or the user interrupts.

    A run that resumes from a step without its validation completes that step first.
    """
    trainer = run.config.trainer
    with run.phase("generate"):
        run.roles.publish(run.version).wait()
    if not run.is_recorded:
        run.recorder.require_save()
        _validate_record_save(run)
    elif trainer.val_before_train and run.step == 0:
        run.record_step(validation=validate(run))
    for step in run.steps():
        rollouts = generate_and_score(run, step)
        batch = prepare_batch(run.learning, rollouts.groups)
        advantages = group_advantages(
            run.learning,
            batch,
            rollouts.groups,
            rollouts.baselines,
            kl_coef=run.progress.kl_controller.kl_coef,
        )
        report = StepReport(run, rollouts, advantages)
        with run.phase("update"):
            update = start_update(run.learning, advantages.batch, run.progress)
            lost = publish_and_prefetch(run, report)
            updated = update.result()
        digests = run.roles.weight_digests()
        if lost is None:
            confirm_prefetch(run, digests)
        parity = parity_metrics(batch, run.rules.needs)
        run.advance(finish_step(run, report, updated, parity, digests))
        if lost is not None:
            raise lost
        _validate_record_save(run)
    run.save()


def publish_and_prefetch(run: OnlineRun, report: StepReport) -> UserError | None:
    """Publish the updated weights and submit the next step; the error that ends generation, if any.

    The trainer has made its step, whether or not an engine takes the weights: the caller finishes
    the step before it raises the error, so that a checkpoint has it.
    """
    try:
        publication = run.roles.publish(run.version + 1)
        if run.roles.generates_remotely:
            report.prepare()
            prefetch_next_step(run)
        publication.wait()
    except UserError as error:
        if error.field != rollout_engines.field:
            raise
        return error
    return None


def _validate_record_save(run: OnlineRun) -> None:
    """Complete a finished step: validate if due, write its metrics, save if due."""
    trainer = run.config.trainer
    validation = validate(run) if run.is_due(trainer.test_freq) else {}
    run.record_step(validation=validation)
    if run.is_due(trainer.save_freq):
        run.save()


def prefetch_next_step(run: OnlineRun) -> None:
    """Submit the prompts of the next step while the current one updates.

    Does nothing where the next step cannot be prefetched, or where the journal has work of it from
    an earlier process: then `confirm_prefetch` submits it, once its parent digest is known.
    """
    scheduler = _ordered_scheduler(run)
    if scheduler is not None and _can_prefetch(run) and not _has_journal_of(run, run.step + 2):
        scheduler.prefetch(run.step + 2, version=run.version + 1)


def confirm_prefetch(run: OnlineRun, digests: WeightDigests) -> None:
    """Set the parent digest of the next step; submit the step if it was not prefetched.

    `digests` are those of the updated weights, which the next step generates with.
    """
    scheduler = _ordered_scheduler(run)
    if scheduler is None or not (scheduler.has_unconfirmed or _can_prefetch(run)):
        return
    with run.phase("digest"):
        origin = run.chain, weights_hash(digests)
        if scheduler.has_unconfirmed:
            scheduler.confirm(origin, version=run.version + 1)
        else:
            scheduler.submit_up_to(run.step + 2, version=run.version + 1, origin=origin)


def _ordered_scheduler(run: OnlineRun) -> OrderedScheduler | None:
    return run.scheduler if isinstance(run.scheduler, OrderedScheduler) else None


def _has_journal_of(run: OnlineRun, step: int) -> bool:
    """Whether the journal has recorded work of this future step."""
    journals = run.recorder.journals
    return journals is not None and journals.has(step, kind="work")


def _can_prefetch(run: OnlineRun) -> bool:
    """Whether replicas are free to generate the next step after the update, and its rows are known.

    A validation or a checkpoint after this step, staleness (which submits ahead anyway), an
    adaptive sampler (which needs this step's scores) and an interruption prevent it.
    """
    trainer, learned = run.config.trainer, run.step + 1
    return (
        run.roles.generates_remotely
        and trainer.max_staleness == 0
        and learned < run.last_step
        and not run.interruption.is_wanted
        and not any(run.is_due_after(learned, n) for n in (trainer.test_freq, trainer.save_freq))
        and not isinstance(run.data.sampler, AdaptiveSampler)
    )
