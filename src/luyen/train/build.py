"""From a configuration to a wired run. The one place that knows every package."""

import os
from contextlib import ExitStack
from dataclasses import replace

from luyen.base.errors import UserError
from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.tokenizer import Tokenizer
from luyen.rewards.build import BuiltReward, build_reward
from luyen.rewards.learned import Scorer
from luyen.rollout.build import Surroundings
from luyen.runtime.roles import Roles
from luyen.runtime.strict import VARIABLE, StrictRoles
from luyen.telemetry.display import Display
from luyen.train.build_learning import learning_rules
from luyen.train.build_roles import build_roles
from luyen.train.engine_judge import PURPOSE as JUDGE
from luyen.train.engine_judge import EngineAsk
from luyen.train.learned_reward import learned_services
from luyen.train.needs import Needs
from luyen.train.recorder import Recorder
from luyen.train.run import OnlineRun
from luyen.train.sampling import training_sampling


def _roles(
    report: Report,
    data: TrainData,
    tokenizer: Tokenizer,
    needs: Needs,
    surroundings: Surroundings | None,
) -> tuple[Roles, Scorer | None]:
    """In this process, or on a cluster, where the reward model has processes of its own."""
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
        return (StrictRoles(roles) if os.environ.get(VARIABLE) == "1" else roles), None
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
    ask = EngineAsk(data.renderer, longest=longest_sequence(config))
    with ExitStack() as opened:
        roles, scorer = _roles(report, data, tokenizer, rules.needs, surroundings)
        opened.callback(roles.close)
        reward = build_run_reward(report, data, recorder, display, scorer=scorer, ask=ask)
        opened.callback(reward.close)
        validation = data.validation.prompts if data.validation is not None else ()
        judged = (*data.train.prompts, *validation) if rules.needs.reward else validation
        reward.check_sources({p.data_source for p in judged})
        run = OnlineRun(
            config=config,
            data=data,
            roles=roles,
            reward=reward,
            rules=rules,
            sampling=training_sampling(config, tokenizer),
            recorder=recorder,
            display=display,
            total_steps=total_steps(config, len(data.train.prompts)),
        )
        opened.pop_all()
    ask.connect(
        lambda draws, sampling: roles.generation.all_compared(
            roles.submit(draws, sampling, purpose=JUDGE, version=run.version).result()
        )
    )
    return run


def build_run_reward(
    report: Report,
    data: TrainData,
    recorder: Recorder,
    display: Display,
    *,
    scorer: Scorer | None,
    ask: EngineAsk,
) -> BuiltReward:
    """The reward with what only a run has: its reward model, its engine, its folder."""
    config = report.config
    services = learned_services(
        config, data.renderer, scorer, report.plan.where.device, say=display.waiting
    )
    return build_reward(
        config.reward,
        max_response_length=config.data.max_response_length,
        services=replace(services, ask=ask),
        folder=recorder.directory.root,
        require=config.sandbox.require,
    )


def longest_sequence(config: RunConfig) -> int:
    """Tokens that the engine holds of a prompt and its answer."""
    return config.data.max_prompt_length + config.data.max_response_length


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
