"""Rewards become advantages: KL in the reward, off-policy correction, estimator, teacher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.advantages import Credit, CreditInputs
from luyen.algorithms.advantages.grouping import (
    baseline_bias,
    estimator_baselines,
    group_statistics,
)
from luyen.algorithms.advantages.inputs import call_estimator
from luyen.algorithms.aggregation import Average
from luyen.algorithms.correction.correct import rollout_correction
from luyen.algorithms.distillation import distillation_advantages
from luyen.algorithms.kl import kl_penalty
from luyen.algorithms.layout import Layout
from luyen.config.catalog import ADV_ESTIMATORS
from luyen.config.schema.algorithm import RolloutCorrectionConfig
from luyen.engine.batch import PackedBatch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvantages:
    """A batch with advantages, ready for the update, and its metrics.

    Example:
        >>> BatchAdvantages(batch=None, measured={"actor/ref_kl": 0.5}, kl=0.5,
        ...          of_groups=lambda: {"group/variance": 0.1}).metrics
        {'actor/ref_kl': 0.5, 'group/variance': 0.1}
    """

    batch: PackedBatch
    """With the streams `advantages` and `returns`, and `is_weights` where a correction is on."""
    measured: Mapping[str, float]
    """Metrics of the computation: mismatch, KL, estimator."""
    kl: float | None
    """Mean KL to the reference; None without one."""
    of_groups: Callable[[], Mapping[str, float]]
    """Computes group metrics; deferred, because the update does not need them."""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics; computes those of groups."""
        return {**self.measured, **self.of_groups()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """How advantages are computed in this run.

    Example:
        >>> AdvantageConfig(estimator="rloo", hparams={}, is_group_relative=True, kl_kind=None,
        ...             correction=None).estimator
        'rloo'
    """

    estimator: str
    """Name of the advantage estimator."""
    hparams: Mapping[str, Any]
    """Its hyperparameters."""
    is_group_relative: bool
    """Whether it compares the samples of a group."""
    kl_kind: str | None
    """KL estimator of the term in the reward; None: no such term."""
    correction: RolloutCorrectionConfig | None
    """Off-policy correction; None: off, or bypass mode, where the loss corrects."""
    task_weight: float | None = None
    """Weight of the estimator's advantages added to a teacher's; None: no teacher."""


def compute_advantages(
    batch: PackedBatch,
    rules: AdvantageConfig,
    *,
    kl_coef: float,
    baselines: Tensor | None = None,
    components: Mapping[str, Tensor] | None = None,
) -> BatchAdvantages:
    """Add advantages and returns of every token. Rejection changes no reward and no denominator.

    The unit is the rollout: one that was split into branches counts once in its group, and its
    branches are estimated as one sequence.
    """
    streams, layout = dict(batch.streams), batch.rollouts
    metrics: dict[str, float] = {}
    kl = None
    if "ref_logp" in streams:
        # Without a pass for old log-probs, the sampler's are used.
        old = streams.get("old_logp", streams["rollout_logp"])
        gap = kl_penalty(rules.kl_kind or "kl", old, streams["ref_logp"])
        penalty = layout.on_mask(gap)
        kl = float(penalty.sum() / layout.mask.sum())
        metrics["actor/ref_kl"] = kl
        if rules.kl_kind is not None:
            streams["rewards"] = streams["rewards"] - kl_coef * penalty
            metrics["actor/reward_kl_coef"] = kl_coef
    if rules.correction is not None:
        streams |= _correction_weights(streams, layout, rules.correction, metrics)
    result: Credit | None = None
    of_groups = dict[str, float]
    if "rewards" in streams:
        inputs = _inputs(streams, layout, baselines, components)
        result = call_estimator(rules.estimator, inputs, rules.hparams)
        task_rewards = batch.streams["rewards"]
        of_groups = partial(_group_metrics, rules.estimator, inputs, task_rewards=task_rewards)
    if rules.task_weight is not None:
        result = with_teacher(result, streams, layout, task_weight=rules.task_weight)
    assert result is not None, "neither a reward nor a teacher is configured"
    counted = {name: found for name, found in result.metrics.items() if float(found.count) > 0}
    metrics |= {name: average.value() for name, average in counted.items()}
    ready = batch.with_streams(**streams, advantages=result.advantages, returns=result.returns)
    return BatchAdvantages(batch=ready, measured=metrics, kl=kl, of_groups=of_groups)


def with_teacher(
    task: Credit | None, streams: Mapping[str, Tensor], layout: Layout, *, task_weight: float
) -> Credit:
    """log teacher - log student of each sampled token, plus weighted advantages of the task.

    Returns stay those of the task: the critic predicts the task's reward, not the teacher's.
    """
    taught = distillation_advantages(streams["old_logp"], streams["teacher_logp"], layout)
    metrics = {"distill/reverse_kl": Average.over(-taught, layout.mask)}
    if task is None:
        return Credit(advantages=taught, returns=taught, metrics=metrics)
    both = taught + task_weight * task.advantages
    return Credit(advantages=both, returns=task.returns, metrics={**task.metrics, **metrics})


def _inputs(
    streams: Mapping[str, Tensor],
    layout: Layout,
    baselines: Tensor | None,
    components: Mapping[str, Tensor] | None,
) -> CreditInputs:
    return CreditInputs(
        rewards=streams["rewards"],
        layout=layout,
        values=streams.get("values"),
        baselines=baselines,
        components=components,
        old_logp=streams.get("old_logp"),
        ref_logp=streams.get("ref_logp"),
        sum_pi_squared=streams.get("sum_pi_squared"),
        is_weights=streams.get("is_weights"),
        turns=streams.get("turns"),
    )


def _correction_weights(
    streams: Mapping[str, Tensor],
    layout: Layout,
    hparams: RolloutCorrectionConfig,
    metrics: dict[str, float],
) -> dict[str, Tensor]:
    found = rollout_correction(
        streams["old_logp"],
        streams["rollout_logp"],
        layout,
        rollout_is=hparams.rollout_is,
        rollout_is_threshold=hparams.rollout_is_threshold,
        rollout_is_floor=hparams.rollout_is_floor,
        rollout_is_batch_normalize=hparams.rollout_is_batch_normalize,
        rollout_rs=hparams.rollout_rs,
        rollout_rs_threshold=hparams.rollout_rs_threshold,
    )
    metrics |= found.metrics
    # A rejected token still counts in the denominator but has no gradient.
    return {"is_weights": torch.where(found.keep, found.weights, 0.0)}


def _group_metrics(
    estimator: str, inputs: CreditInputs, *, task_rewards: Tensor
) -> dict[str, float]:
    rewards, groups = inputs.sequence_rewards(), inputs.layout.groups
    statistics = group_statistics(rewards, groups)
    # Solve rates use the reward without the KL term.
    solved = group_statistics(replace(inputs, rewards=task_rewards).sequence_rewards(), groups)
    found: dict[str, float | None] = {
        "group/variance": statistics.within_group_variance,
        "group/zero_std_fraction": statistics.zero_std_fraction,
        "group/solve_all_fraction": solved.solve_all_fraction,
        "group/solve_none_fraction": solved.solve_none_fraction,
    }
    # The baseline of a plugin's estimator is unknown here.
    baselines = estimator_baselines(estimator, inputs) if estimator in ADV_ESTIMATORS else None
    if baselines is not None:
        bias = baseline_bias(baselines, rewards, groups)
        found["group/baseline_bias"] = bias.signed
        found["group/baseline_bias_abs"] = bias.absolute
    return {name: value for name, value in found.items() if value is not None}
