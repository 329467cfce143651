"""The RL loop. Everything it calls does one thing; read on in the module of that name."""

from luyen.train.annotate import parity_metrics
from luyen.train.early import ask_early, know_weights
from luyen.train.groups import take_groups
from luyen.train.learn import annotated, credit_groups
from luyen.train.report import Told, finish_step
from luyen.train.run import OnlineRun
from luyen.train.update import start_update
from luyen.train.validation import validate


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
        groups = take_groups(run, step)
        batch = annotated(run, groups)
        credited = credit_groups(run, batch, groups, run.baselines)
        told = Told(run, groups, credited)
        with run.phase("update"):
            update = start_update(run, credited.batch, step)
            publication = run.roles.publish(run.version + 1)
            if run.roles.draws_elsewhere:
                told.prepare()
                ask_early(run)
            publication.wait()
            metrics = update.result()
        held = run.roles.describe()
        know_weights(run, held)
        measured = {**parity_metrics(batch, run.needs), **metrics}
        finish_step(run, credited, measured, told, held)
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
