"""The stage `preference`: pairs of answers, or answers that are marked good or bad."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.preference.step import PreferenceObjective, preference_facts
from luyen.algorithms.statistic import Average
from luyen.config.preference_knobs import preference_knobs
from luyen.config.schema.run import RunConfig
from luyen.data.formats.forms import Kind
from luyen.data.offline import OfflineData
from luyen.engine.lesson import Lesson
from luyen.engine.preference import MISMATCHED, PreferenceEngine, Sums
from luyen.engine.step import Updated
from luyen.models.lora import adapter_off
from luyen.train.build_roles import frozen_policy
from luyen.train.offline.pairs import lay_marked, lay_pairs, margin_of
from luyen.train.offline.precomputed import precomputed
from luyen.train.offline.sft import actor_state, build_learner, restore_actor
from luyen.train.offline.stage import Given, Goal, OfflineStage, StageKind, held_out

_STATE = "preference"


@final
class PreferenceStage:
    """A policy that learns to prefer what people prefer."""

    goals = (
        Goal(metric="preference/val_accuracy", label="held-out preference accuracy"),
        Goal(metric="preference/accuracy", label="preference accuracy"),
    )

    def __init__(
        self,
        engine: PreferenceEngine,
        data: OfflineData[Any],
        *,
        use_margins: bool,
        is_mismatched: bool,
        longest: int,
    ) -> None:
        self._engine = engine
        self._data = data
        self._use_margins = use_margins
        self._is_mismatched = is_mismatched
        self._longest = longest
        if use_margins:
            for row in (*data.train, *data.validation):
                margin_of(row)

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._engine.learner.policy.device

    def lesson(self, rows: Sequence[int]) -> Lesson:
        """The rows at these places: two sequences for a pair, one for a marked answer."""
        return self._lay(self._data.train, rows)

    def update(self, lesson: Lesson, *, lr: float) -> Updated:
        """One optimizer step."""
        return self._engine.update(lesson, lr=lr)

    def measure(self) -> dict[str, float]:
        """The same numbers as of a step, on all held-out rows."""
        rows = self._data.validation
        if not rows:
            return {}
        found = self._engine.measure(self._lay(rows, range(len(rows)), is_held=True))
        return held_out(found)

    def state(self) -> dict[str, Any]:
        """Weights, optimizer, and what earlier steps left to later ones."""
        history = self._engine.history
        kept = None if history is None else [float(history.total), float(history.count)]
        return {**actor_state(self._engine.learner), _STATE: {"history": kept}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where another stood."""
        restore_actor(self._engine.learner, state)
        kept = state[_STATE]["history"]
        total, count = (torch.tensor(x, dtype=torch.float64) for x in kept or (0.0, 0.0))
        self._engine.history = None if kept is None else Average(total=total, count=count)

    def lessons(self, size: int) -> Iterator[Lesson]:
        """Every training row once and then every held-out one, so many at a time."""
        for rows, is_held in ((self._data.train, False), (self._data.validation, True)):
            for first in range(0, len(rows), size):
                places = range(first, min(first + size, len(rows)))
                yield self._lay(rows, places, is_held=is_held)

    def _lay(self, rows: Sequence[Any], places: Sequence[int], *, is_held: bool = False) -> Lesson:
        renderer = self._data.given.renderer
        if self._engine.objective.kind == "pair":
            return lay_pairs(
                rows, places, renderer, self.device, use_margins=self._use_margins, is_held=is_held
            )
        return lay_marked(
            rows,
            places,
            renderer,
            self.device,
            is_mismatched=self._is_mismatched,
            longest=self._longest,
            is_held=is_held,
        )


def objective_of(config: RunConfig) -> PreferenceObjective:
    """What the stage minimises."""
    preference = config.preference
    return PreferenceObjective(
        losses=preference.loss_type,
        loss_weights=preference.loss_weights or None,
        knobs=preference_knobs(preference),
        ld_alpha=preference.ld_alpha,
    )


def live_reference(
    given: Given, engine: PreferenceEngine
) -> tuple[Callable[[Lesson], Sums], Mapping[str, Tensor]]:
    """A frozen copy of the beginning, or the policy with its adapter off; and its weights."""
    policy = engine.learner.policy
    if given.config.actor_rollout_ref.model.lora_rank == 0:
        frozen = frozen_policy(given.config, given.tokenizer, given.device)
        return lambda lesson: engine.sums(frozen, lesson), dict(frozen.named_parameters())

    def without_adapter(lesson: Lesson) -> Sums:
        with adapter_off(policy):
            return engine.sums(policy, lesson)

    return without_adapter, dict(policy.named_parameters())


def kinds_of(config: RunConfig) -> tuple[Kind, ...]:
    """Which rows the losses read."""
    is_paired = preference_facts(config.preference.loss_type[0]).kind == "pair"
    return (Kind.PREFERENCE,) if is_paired else (Kind.LABELLED, Kind.PREFERENCE)


def _build(given: Given) -> OfflineStage:
    config = given.config
    objective = objective_of(config)
    engine = PreferenceEngine(build_learner(config, given.tokenizer, given.device), objective)
    stage = PreferenceStage(
        engine,
        given.data,
        use_margins=config.preference.use_margins,
        is_mismatched=objective.reads(MISMATCHED),
        longest=config.data.max_prompt_length + config.data.max_response_length,
    )
    if objective.needs_reference:
        live, weights = live_reference(given, engine)
        # A replay of some steps asks for their rows only, and leaves the run's files alone.
        if config.preference.reference == "precomputed" and given.directory is not None:
            live = precomputed(live, stage.lessons, given, given.directory, weights=weights)
        engine.reference = live
    return stage


STAGE = StageKind(kinds=kinds_of, build=_build)
