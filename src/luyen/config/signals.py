"""What a run learns from besides rewards: a teacher, or pairs of its own samples."""

from collections.abc import Mapping
from typing import TypeAlias

from luyen.config.catalog import PREFERENCE_LOSSES, PreferenceFacts
from luyen.config.schema.run import RunConfig

PreferenceLosses: TypeAlias = Mapping[str, PreferenceFacts]
"""Losses of preferences by name, with what must be known about each."""
ONLINE_PAIRS = "online_dpo"
"""The estimator that pairs the samples of a prompt."""


def has_teacher(config: RunConfig) -> bool:
    """Whether the run keeps a teacher, for given answers or for those of the student."""
    stage, distill = config.trainer.stage, config.distill
    return stage == "distill" or (stage == "rl" and distill.on_policy)


def is_teacher_alone(config: RunConfig) -> bool:
    """Whether an online run learns from its teacher and from no reward."""
    distill = config.distill
    return config.trainer.stage == "rl" and distill.on_policy and distill.task_weight == 0


def makes_pairs(config: RunConfig) -> bool:
    """Whether samples of a prompt are paired, best with worst, and compared as preferences."""
    is_judged = config.trainer.stage == "rl" and not is_teacher_alone(config)
    return is_judged and config.algorithm.adv_estimator == ONLINE_PAIRS


def pairs_need_reference(config: RunConfig) -> bool:
    """Whether such pairs are compared with a reference."""
    losses = (PREFERENCE_LOSSES.get(name) for name in config.preference.loss_type)
    return makes_pairs(config) and any(facts is None or facts.reference for facts in losses)


def sequences_of_a_row(config: RunConfig, losses: PreferenceLosses) -> int:
    """Sequences that learn from one row of an offline stage: two of a pair, one of any other."""
    stage = config.trainer.stage
    if stage == "reward_model":
        return 2 if config.reward_training.objective == "bradley_terry" else 1
    if stage != "preference":
        return 1
    facts = losses.get(next(iter(config.preference.loss_type), ""))
    return 1 if facts is not None and facts.kind == "unpaired" else 2


def rows_need_reference(config: RunConfig) -> bool:
    """Whether a stage of preferences keeps a reference beside the policy at every step."""
    if config.trainer.stage != "preference" or config.preference.reference != "live":
        return False
    losses = (PREFERENCE_LOSSES.get(name) for name in config.preference.loss_type)
    return any(facts is None or facts.reference for facts in losses)
