"""From a configuration to the rules that it learns by."""

from luyen.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL
from luyen.algorithms.objective import Objective
from luyen.config.catalog import EstimatorFacts
from luyen.config.knobs import estimator_knobs, loss_knobs
from luyen.config.plan import loss_in_force
from luyen.config.plugins import Known, read_plugins
from luyen.config.schema.actor import Actor
from luyen.config.schema.algorithm import RolloutCorrection
from luyen.config.schema.run import RunConfig
from luyen.config.signals import is_teacher_alone
from luyen.train.credit import CreditRules
from luyen.train.learning import LearningRules
from luyen.train.needs import needs_of


def learning_rules(config: RunConfig) -> LearningRules:
    """The rules of a run whose plugins were imported, as it begins."""
    known, _ = read_plugins(config.trainer.plugins)
    estimator = known.estimators[config.algorithm.adv_estimator]
    return LearningRules(
        needs=needs_of(config, estimator),
        objective=build_objective(config, known),
        credit_rules=_credit_rules(config, estimator),
        kl_controller=_kl_controller(config),
        entropy_controller=_entropy_controller(config.actor_rollout_ref.actor),
    )


def build_objective(config: RunConfig, known: Known) -> Objective:
    """What the policy's update minimises."""
    actor = config.actor_rollout_ref.actor
    name = loss_in_force(config)
    return Objective(
        loss=name,
        knobs=loss_knobs(config, known.losses[name]),
        aggregation=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
    )


def _credit_rules(config: RunConfig, estimator: EstimatorFacts) -> CreditRules:
    algorithm = config.algorithm
    return CreditRules(
        estimator=algorithm.adv_estimator,
        knobs=estimator_knobs(config, estimator),
        is_group_relative=estimator.group_relative and not is_teacher_alone(config),
        kl_kind=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        correction=_correction(config),
        task_weight=config.distill.task_weight if config.distill.on_policy else None,
    )


def _correction(config: RunConfig) -> RolloutCorrection | None:
    rollout_correction = config.algorithm.rollout_correction
    wanted = rollout_correction.rollout_is or rollout_correction.rollout_rs
    return rollout_correction if wanted and not rollout_correction.bypass_mode else None


def _kl_controller(config: RunConfig) -> FixedKL | AdaptiveKL:
    kl_ctrl = config.algorithm.kl_ctrl
    if kl_ctrl.type == "fixed":
        return FixedKL(kl_coef=kl_ctrl.kl_coef)
    return AdaptiveKL(kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon)


def _entropy_controller(actor: Actor) -> AdaptiveEntropy | None:
    adaptive_entropy = actor.adaptive_entropy
    if not adaptive_entropy.enable:
        return None
    return AdaptiveEntropy(
        coefficient=actor.entropy_coeff,
        target=adaptive_entropy.target,
        delta=adaptive_entropy.delta,
        min=adaptive_entropy.min,
        max=adaptive_entropy.max,
    )
