"""From a configuration to a wired run. The one place that knows every package."""

import os

from luyen.base.errors import UserError
from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.tokenizer import Tokenizer
from luyen.rewards.build import build_reward
from luyen.rollout.build import Surroundings
from luyen.rollout.protocol import Sampling
from luyen.runtime.roles import Roles
from luyen.runtime.strict import VARIABLE, StrictRoles
from luyen.telemetry.display import Display
from luyen.train.build_learning import learning_rules
from luyen.train.build_roles import build_roles
from luyen.train.needs import Needs
from luyen.train.recorder import Recorder
from luyen.train.run import OnlineRun


def _roles(
    report: Report,
    data: TrainData,
    tokenizer: Tokenizer,
    needs: Needs,
    surroundings: Surroundings | None,
) -> Roles:
    """In this process, or on a cluster."""
    config, where = report.config, report.plan.where
    if where.runtime == "local":
        roles = build_roles(
            config,
            data.renderer,
            tokenizer,
            needs,
            where.device,
            surroundings=surroundings,
            runs_ahead=config.trainer.max_staleness > 0,
        )
        return StrictRoles(roles) if os.environ.get(VARIABLE) == "1" else roles
    from luyen.train.build_ray import build_ray_roles  # ray, and torch's collectives

    return build_ray_roles(config, data.renderer, needs, where, surroundings=surroundings)


def build_run(
    report: Report,
    data: TrainData,
    tokenizer: Tokenizer,
    recorder: Recorder,
    display: Display,
    surroundings: Surroundings | None,
) -> OnlineRun:
    """Every part of a run, made from a configuration that passed its check."""
    config = report.config
    rules = learning_rules(config)
    reward = build_reward(config.reward, max_response_length=config.data.max_response_length)
    validation = data.validation.prompts if data.validation is not None else ()
    judged = (*data.train.prompts, *validation) if rules.needs.reward else validation
    reward.check_sources({p.data_source for p in judged})
    return OnlineRun(
        config=config,
        data=data,
        roles=_roles(report, data, tokenizer, rules.needs, surroundings),
        reward=reward,
        rules=rules,
        sampling=training_sampling(config, tokenizer),
        recorder=recorder,
        display=display,
        total_steps=total_steps(config, len(data.train.prompts)),
    )


def total_steps(config: RunConfig, rows: int) -> int:
    """Steps of the run; a UserError when the rows do not make one."""
    trainer, data = config.trainer, config.data
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    steps = trainer.total_epochs * rows // data.train_batch_size
    if steps == 0:
        raise UserError(
            "data.train_batch_size",
            data.train_batch_size,
            f"{trainer.total_epochs} epochs of {rows} rows do not fill one step",
            "lower train_batch_size, or set trainer.total_training_steps",
        )
    return steps


def training_sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    """How training draws."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_ids=tokenizer.stop_ids,
    )
