"""The stage `distill`: answers that are given, and a teacher's distribution at each token."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from luyen.config.schema.run import RunConfig
from luyen.data.formats.forms import Kind
from luyen.data.offline import OfflineData
from luyen.engine.batch import PackedBatch
from luyen.engine.distill import DistillEngine, DistillObjective
from luyen.engine.lesson import Lesson
from luyen.engine.step import Updated
from luyen.train.offline.sft import (
    Learnable,
    actor_state,
    build_learner,
    pack_conversations,
    restore_actor,
)
from luyen.train.offline.stage import Given, Goal, OfflineStage, StageKind, held_out
from luyen.train.teacher import load_teacher


@final
class DistillStage:
    """A student that learns what a teacher would say in the place of each answer."""

    goals = (
        Goal(metric="distill/val_divergence", label="divergence from the teacher, held-out rows"),
        Goal(metric="distill/divergence", label="divergence from the teacher"),
    )

    def __init__(self, engine: DistillEngine, data: OfflineData[Learnable]) -> None:
        self._engine = engine
        self._data = data

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._engine.learner.policy.device

    def lesson(self, rows: Sequence[int]) -> Lesson:
        """The rows at these places as packed tokens."""
        chosen = [self._data.train[i] for i in rows]
        return Lesson(rows=tuple(rows), batch=self._packed(chosen))

    def update(self, lesson: Lesson, *, lr: float) -> Updated:
        """One optimizer step; how many tokens it learned from is among its metrics."""
        done = self._engine.update(lesson.batch, lr=lr)
        tokens = float(lesson.batch.layout.mask.sum())
        return Updated(stepped=done.stepped, metrics={**done.metrics, "distill/tokens": tokens})

    def measure(self) -> dict[str, float]:
        """The same numbers as of a step, on all held-out rows."""
        if not self._data.validation:
            return {}
        found = self._engine.measure(self._packed(self._data.validation))
        return held_out(found)

    def state(self) -> dict[str, Any]:
        """Weights and optimizer of the student; the teacher is where it was."""
        return actor_state(self._engine.learner)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where another stood."""
        restore_actor(self._engine.learner, state)

    def _packed(self, rows: Sequence[Learnable]) -> PackedBatch:
        return pack_conversations(rows, self._data.given.renderer, self.device)


def distill_objective(config: RunConfig) -> DistillObjective:
    """What the stage minimises."""
    distill = config.distill
    return DistillObjective(
        divergence=distill.divergence,
        beta=distill.beta,
        top_k=distill.top_k,
        temperature=distill.temperature,
        nll_weight=distill.nll_weight,
    )


def _build(given: Given) -> OfflineStage:
    config = given.config
    learner = build_learner(config, given.tokenizer, given.device)
    teacher = load_teacher(config, given.tokenizer, given.device)
    return DistillStage(DistillEngine(learner, teacher, distill_objective(config)), given.data)


STAGE = StageKind(kinds=lambda _: (Kind.CONVERSATION, Kind.TEXT, Kind.PROMPTS), build=_build)
