"""The RL loop: rollouts, log-probs, advantages, update, record; prefetches the next step."""

from luyen.data.samplers import AdaptiveSampler
from luyen.runtime.roles import WeightDigests
from luyen.train.batch import parity_metrics
from luyen.train.metrics import StepReport, finish_step
from luyen.train.run import OnlineRun, weights_hash
from luyen.train.schedulers import OrderedScheduler
from luyen.train.scoring import collect_groups
from luyen.train.update import group_advantages, prepare_batch, start_update
from luyen.train.validation import validate

# The next step's rollouts begin as soon as its weights are there, while this one is written
# down.
#
# They are asked for while others learn. What is drawn depends on the weights alone, so it is
# what would be drawn later.


def prefetch_next_step(run: OnlineRun) -> None:
    """Ask for the rollouts of the step after the one that is being learned, while it is.

    They are drawn as soon as the weights are there, if nothing comes between. Work that an earlier
    process has done of that step is not done again: with that, it is asked for when it is known
    whose weights it depends on.
    """
    supply = _ordered_scheduler(run)
    if supply is not None and _can_prefetch(run) and not _has_journal_of(run, run.step + 2):
        supply.ask_early(run.step + 2, version=run.version + 1)


def confirm_prefetch(run: OnlineRun, held: WeightDigests) -> None:
    """`held` are the weights that the next step is drawn with; ask for it, if nobody has."""
    supply = _ordered_scheduler(run)
    if supply is None or not (supply.has_early or _can_prefetch(run)):
        return
    with run.phase("digest"):
        run.origin = run.chain, weights_hash(held)
        if supply.has_early:
            supply.know(run.origin, version=run.version + 1)
        else:
            supply.ask_up_to(run.step + 2, version=run.version + 1, origin=run.origin)


def _ordered_scheduler(run: OnlineRun) -> OrderedScheduler | None:
    return run.supply if isinstance(run.supply, OrderedScheduler) else None


def _has_journal_of(run: OnlineRun, step: int) -> bool:
    """Whether a process has written down work of a step that is still to come."""
    journals = run.recorder.journals
    return journals is not None and journals.has(step, kind="work")


def _can_prefetch(run: OnlineRun) -> bool:
    """Whether others draw the next step when this one is learned, and its rows are known then."""
    trainer, learned = run.config.trainer, run.step + 1
    return (
        run.roles.generates_remotely
        and trainer.max_staleness == 0
        and learned < run.last_step
        and not run.interruption.is_wanted
        and not any(run.is_due_after(learned, n) for n in (trainer.test_freq, trainer.save_freq))
        and not isinstance(run.data.sampler, AdaptiveSampler)
    )


def train_online(run: OnlineRun) -> None:
    """Rollout, annotate, credit, update, until the steps are done or the user interrupts."""
    trainer = run.config.trainer
    with run.phase("generate"):
        run.roles.publish(run.version).wait()
    if run.is_open:
        run.saved = -1  # the checkpoint that it goes on from lacks what comes now
        _finish(run)
    elif trainer.val_before_train and run.step == 0:
        validate(run)
        run.write_down()
    for step in run.steps():
        groups = collect_groups(run, step)
        batch = prepare_batch(run, groups)
        credited = group_advantages(run, batch, groups, run.baselines)
        step_report = StepReport(run, groups, credited)
        with run.phase("update"):
            update = start_update(run, credited.batch, step)
            publication = run.roles.publish(run.version + 1)
            if run.roles.generates_remotely:
                step_report.prepare()
                prefetch_next_step(run)
            publication.wait()
            metrics = update.result()
        held = run.roles.weight_digests()
        confirm_prefetch(run, held)
        measured = {**parity_metrics(batch, run.needs), **metrics}
        finish_step(run, credited, measured, step_report, held)
        _finish(run)
    run.save()


def _finish(run: OnlineRun) -> None:
    """Validate, write down and save a step that is done, where each is due."""
    trainer = run.config.trainer
    run.is_open = run.is_due(trainer.test_freq)
    if run.is_open:
        validate(run)
    run.write_down()
    if run.is_due(trainer.save_freq):
        run.save()
