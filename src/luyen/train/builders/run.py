"""Build a run from a configuration: roles, reward, objective, controllers, step count."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

from luyen.algorithms.controllers import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedKLController,
)
from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.config.catalog import EstimatorFacts
from luyen.config.check import Report
from luyen.config.plan import estimator_kwargs, is_pure_distillation, loss_in_force, loss_kwargs
from luyen.config.plugins import PluginRegistry, read_plugins
from luyen.config.schema.actor_rollout_ref import ActorConfig
from luyen.config.schema.algorithm import RolloutCorrectionConfig
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.tokenizer import Tokenizer
from luyen.rewards.build import BuiltReward, build_reward
from luyen.rewards.reward_model import Scorer
from luyen.rollout.build import ToolEnvironment
from luyen.runtime.roles import Roles
from luyen.telemetry.display import Display
from luyen.train.advantages import AdvantageConfig
from luyen.train.batch import RequiredSignals, required_signals
from luyen.train.builders.reward import JUDGE_PURPOSE as JUDGE
from luyen.train.builders.reward import EngineJudge, reward_model_services
from luyen.train.builders.roles import build_roles, training_sampling
from luyen.train.record import Recorder
from luyen.train.run import OnlineRun
from luyen.train.state import LearningRules


def learning_rules(config: RunConfig) -> LearningRules:
    """Signals, objective, advantages and controllers; plugins must have been imported."""
    plugins, _ = read_plugins(config.trainer.plugins)
    estimator = plugins.estimators[config.algorithm.adv_estimator]
    return LearningRules(
        needs=required_signals(config, estimator),
        objective=build_objective(config, plugins),
        advantage_config=_advantage_config(config, estimator),
        kl_controller=_kl_controller(config),
        entropy_controller=_entropy_controller(config.actor_rollout_ref.actor),
    )


def build_objective(config: RunConfig, plugins: PluginRegistry) -> Objective:
    """Objective of the policy update."""
    actor = config.actor_rollout_ref.actor
    name = loss_in_force(config)
    return Objective(
        loss=name,
        hparams=loss_kwargs(config, plugins.losses[name]),
        aggregation=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        router_aux_loss_coef=actor.router_aux_loss_coef,
    )


def _advantage_config(config: RunConfig, estimator: EstimatorFacts) -> AdvantageConfig:
    algorithm = config.algorithm
    return AdvantageConfig(
        estimator=algorithm.adv_estimator,
        hparams=estimator_kwargs(config, estimator),
        is_group_relative=estimator.group_relative and not is_pure_distillation(config),
        kl_kind=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        correction=_correction(config),
        task_weight=config.distill.task_weight if config.distill.on_policy else None,
    )


def _correction(config: RunConfig) -> RolloutCorrectionConfig | None:
    rollout_correction = config.algorithm.rollout_correction
    wanted = rollout_correction.rollout_is or rollout_correction.rollout_rs
    return rollout_correction if wanted and not rollout_correction.bypass_mode else None


def _kl_controller(config: RunConfig) -> FixedKLController | AdaptiveKLController:
    kl_ctrl = config.algorithm.kl_ctrl
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    return AdaptiveKLController(
        kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon
    )


def _entropy_controller(actor: ActorConfig) -> AdaptiveEntropyController | None:
    adaptive_entropy = actor.adaptive_entropy
    if not adaptive_entropy.enable:
        return None
    return AdaptiveEntropyController(
        coefficient=actor.entropy_coeff,
        target=adaptive_entropy.target,
        delta=adaptive_entropy.delta,
        min=adaptive_entropy.min,
        max=adaptive_entropy.max,
    )


def _roles(
    report: Report,
    data: TrainData,
    tokenizer: Tokenizer,
    needs: RequiredSignals,
    tool_env: ToolEnvironment | None,
) -> tuple[Roles, Scorer | None]:
    """Roles in this process, or on a Ray cluster together with the reward model."""
    config, where = report.config, report.plan.where
    if where.runtime == "local":
        roles = build_roles(
            config,
            data.renderer,
            tokenizer,
            needs,
            where.device,
            tool_env=tool_env,
            runs_ahead=config.trainer.max_staleness > 0,
        )
        return roles, None
    from luyen.train.builders.ray import build_ray_roles  # ray, and torch's collectives

    return build_ray_roles(config, data.renderer, needs, where, tool_env=tool_env)


def build_run(
    report: Report,
    data: TrainData,
    tokenizer: Tokenizer,
    recorder: Recorder,
    display: Display,
    tool_env: ToolEnvironment | None,
) -> OnlineRun:
    """Build all components of a run from a checked configuration."""
    config = report.config
    rules = learning_rules(config)
    judge = EngineJudge(data.renderer, longest=longest_sequence(config))
    with ExitStack() as opened:
        roles, scorer = _roles(report, data, tokenizer, rules.needs, tool_env)
        opened.callback(roles.close)
        reward = build_run_reward(report, data, recorder, display, scorer=scorer, judge=judge)
        opened.callback(reward.close)
        validation = data.validation.prompts if data.validation is not None else ()
        trained = data.train.prompts if rules.needs.reward else ()
        reward.check_sources({p.data_source for p in chain(trained, validation)})
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
    judge.connect(
        lambda requests, sampling: roles.generation.all_compared(
            roles.submit(requests, sampling, purpose=JUDGE, version=run.version).result()
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
    judge: EngineJudge,
) -> BuiltReward:
    """The reward with the services of a run: reward model, engine as judge, run directory."""
    config = report.config
    services = reward_model_services(
        config, data.renderer, scorer, report.plan.where.device, say=display.waiting
    )
    return build_reward(
        config.reward,
        max_response_length=config.data.max_response_length,
        services=replace(services, ask=judge),
        folder=recorder.directory.root,
        require=config.sandbox.require,
    )


def longest_sequence(config: RunConfig) -> int:
    """Maximum tokens of prompt and response."""
    return config.data.max_prompt_length + config.data.max_response_length


def total_steps(config: RunConfig, rows: int) -> int:
    """Steps of the run; a UserError when there are too few rows for one."""
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
