"""The stage `reward_model`: learning to judge answers, or the steps of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from luyen.config.schema.reward_training import RewardTraining
from luyen.config.schema.run import RunConfig
from luyen.data.formats.forms import Kind
from luyen.data.offline import OfflineData
from luyen.engine.lesson import Lesson
from luyen.engine.optim import MasterAdamW
from luyen.engine.reward_model import RewardModelEngine, RewardObjective
from luyen.engine.step import Updated
from luyen.models.reward_model_load import load_reward_model
from luyen.models.state import restore_parameters, trained_parameters
from luyen.models.threads import choose_threads
from luyen.train.build_roles import actor_passes
from luyen.train.offline.judged import BLOCK, lay_judged_pairs, lay_rated, lay_steps, target_of
from luyen.train.offline.pairs import margin_of
from luyen.train.offline.stage import VALIDATION, Given, Goal, OfflineStage, StageKind, held_out

_FIELD = "actor_rollout_ref.model.path"
_KINDS = {
    "bradley_terry": (Kind.PREFERENCE,),
    "regression": (Kind.LABELLED, Kind.CONVERSATION, Kind.PROMPTS),
    "process": (Kind.STEPPED,),
}
_GOALS = {
    "accuracy": "accuracy of judging",
    "absolute_error": "absolute error of scores",
}


@final
class RewardModelStage:
    """A model that learns to judge."""

    def __init__(
        self,
        engine: RewardModelEngine,
        data: OfflineData[Any],
        reward_training: RewardTraining,
    ) -> None:
        self._engine = engine
        self._data = data
        self._reward_training = reward_training
        _demand_numbers((*data.train, *data.validation), reward_training)

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._engine.device

    @property
    def goals(self) -> tuple[Goal, ...]:
        """How often it is right, or how far from the number it should say."""
        name = "absolute_error" if self._reward_training.objective == "regression" else "accuracy"
        label = _GOALS[name]
        return (
            Goal(metric=f"reward_model/{VALIDATION}{name}", label=f"held-out {label}"),
            Goal(metric=f"reward_model/{name}", label=label),
        )

    def lesson(self, rows: Sequence[int]) -> Lesson:
        """The rows at these places as tokens, and where they are judged."""
        return self._lay(self._data.train, rows)

    def update(self, lesson: Lesson, *, lr: float) -> Updated:
        """One optimizer step."""
        return self._engine.update(lesson, lr=lr)

    def measure(self) -> dict[str, float]:
        """The same numbers as of a step, on all held-out rows."""
        rows = self._data.validation
        if not rows:
            return {}
        found = self._engine.measure(self._lay(rows, range(len(rows))))
        return held_out(found)

    def state(self) -> dict[str, Any]:
        """Weights, head included, and optimizer."""
        return {
            "actor": trained_parameters(self._engine.model),
            "actor_optimizer": self._engine.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where another stood."""
        restore_parameters(self._engine.model, state["actor"])
        self._engine.optimizer.load_state_dict(state["actor_optimizer"])

    def _lay(self, rows: Sequence[Any], places: Sequence[int]) -> Lesson:
        renderer, reward_training = self._data.given.renderer, self._reward_training
        match reward_training.objective:
            case "bradley_terry":
                return lay_judged_pairs(
                    rows, places, renderer, self.device, use_margins=reward_training.use_margins
                )
            case "regression":
                return lay_rated(
                    rows, places, renderer, self.device, target_key=reward_training.target_key
                )
            case "process":
                return lay_steps(rows, places, renderer, self.device)


def _demand_numbers(rows: Sequence[Any], reward_training: RewardTraining) -> None:
    """A UserError, before the first step, where a row lacks a number that is learned from."""
    if reward_training.objective == "regression":
        for row in rows:
            target_of(row, reward_training.target_key)
    elif reward_training.objective == "bradley_terry" and reward_training.use_margins:
        for row in rows:
            margin_of(row, block=BLOCK)


def build_reward_engine(config: RunConfig, device: str) -> RewardModelEngine:
    """A reward model over the model of the run, whose head is new where it has none."""
    arr, reward_training = config.actor_rollout_ref, config.reward_training
    model = load_reward_model(arr.model, device=device, field=_FIELD, new_head=config.trainer.seed)
    choose_threads(model)
    objective = RewardObjective(
        name=reward_training.objective,
        center_rewards_coefficient=reward_training.center_rewards_coefficient,
    )
    optimizer = MasterAdamW(model.parameters(), arr.actor.optim)
    return RewardModelEngine(model, optimizer, actor_passes(arr.actor), objective)


def _build(given: Given) -> OfflineStage:
    engine = build_reward_engine(given.config, given.device)
    return RewardModelStage(engine, given.data, given.config.reward_training)


def _columns(config: RunConfig) -> tuple[str, ...]:
    training = config.reward_training
    return (training.target_key,) if training.objective == "regression" else ()


STAGE = StageKind(
    kinds=lambda c: _KINDS[c.reward_training.objective], build=_build, columns=_columns
)
