"""The RL loop. Everything it calls does one thing; read on in the module of that name."""

from luyen.train.annotate import annotate, parity_metrics
from luyen.train.credit import credit
from luyen.train.groups import baselines_of, components_of, take_groups
from luyen.train.report import finish_step
from luyen.train.run import OnlineRun
from luyen.train.samples import pack_groups
from luyen.train.update import update_actor, update_critic
from luyen.train.validation import validate


def train_online(run: OnlineRun) -> None:
    """Rollout, annotate, credit, update, until the steps are done or the user interrupts."""
    trainer = run.config.trainer
    if trainer.val_before_train and run.step == 0:
        validate(run)
        run.write_down()
    for step in run.steps():
        groups = take_groups(run, step)
        batch = pack_groups(groups, run.roles.device)
        with run.phase("log-probs"):
            batch = annotate(batch, run.roles, run.needs)
        rollouts = run.rollouts_of(groups)
        credited = credit(
            batch,
            run.credit_rules,
            kl_coef=run.kl_controller.kl_coef,
            baselines=baselines_of(run, rollouts) if run.needs.baselines else None,
            components=components_of(run, rollouts) if run.needs.components else None,
        )
        with run.phase("update"):
            metrics = update_critic(run, credited.batch, step)
            metrics |= update_actor(run, credited.batch, step)
        finish_step(run, groups, credited, {**parity_metrics(batch, run.needs), **metrics})
        if run.is_due(trainer.test_freq):
            validate(run)
        run.write_down()
        if run.is_due(trainer.save_freq):
            run.save()
    run.save()
