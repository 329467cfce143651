"""The stage `reward_model`: learn to score answers, or the steps of an answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

import torch

from luyen.base.errors import UserError
from luyen.config.schema.algorithm import RewardTrainingConfig
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.formats.records import ConversationRow, LabelledRow, PreferenceRow, SteppedRow
from luyen.data.formats.render import render_answer, render_conversation, render_steps
from luyen.data.offline import OfflineData
from luyen.data.render import Renderer
from luyen.engine.batch import OfflineBatch, PackedBatch, pack
from luyen.engine.optim import build_optimizer
from luyen.engine.reward_model import (
    JUDGED,
    LABELS,
    MARGINS,
    TARGETS,
    RewardModelEngine,
    RewardObjective,
    RewardTrainer,
)
from luyen.engine.step import UpdateResult
from luyen.models.load import choose_threads
from luyen.models.reward_model import load_reward_model
from luyen.runtime.offline import OfflineRoles, OfflineWorker
from luyen.train.offline.pairs import margin_of, pack_pairs
from luyen.train.offline.stage import (
    VALIDATION,
    Goal,
    OfflineStage,
    StageContext,
    StageKind,
    WorkerContext,
    dropout_key,
    validation_names,
)

Rated: TypeAlias = LabelledRow | ConversationRow
BLOCK = "reward_training"


def pack_scored_pairs(
    rows: Sequence[PreferenceRow],
    places: Sequence[int],
    renderer: Renderer,
    device: torch.device,
    *,
    use_margins: bool = False,
) -> OfflineBatch:
    """Two sequences per row, the chosen one first, each scored on its last token."""
    pairs = pack_pairs(rows, places, renderer, device)
    margins = [margin_of(rows[place], block=BLOCK) for place in places] if use_margins else []
    numbers = {MARGINS: torch.tensor(margins, device=device)} if use_margins else {}
    return replace(pairs, batch=_scored_at_the_end(pairs.batch), numbers=numbers)


def pack_rated(
    rows: Sequence[Rated],
    places: Sequence[int],
    renderer: Renderer,
    device: torch.device,
    *,
    target_key: str,
) -> OfflineBatch:
    """One sequence per row, scored on its last token, with the row's target score."""
    chosen = [rows[place] for place in places]
    rendered = [_rated_tokens(row, renderer) for row in chosen]
    batch = pack(
        [tokens for tokens, _ in rendered],
        masks=[mask for _, mask in rendered],
        groups=list(range(len(rendered))),
        device=device,
    )
    targets = torch.tensor([target_of(row, target_key) for row in chosen], device=device)
    return OfflineBatch(
        rows=tuple(places), batch=_scored_at_the_end(batch), numbers={TARGETS: targets}
    )


def pack_steps(
    rows: Sequence[SteppedRow], places: Sequence[int], renderer: Renderer, device: torch.device
) -> OfflineBatch:
    """One sequence per row, scored on the last token of every labelled step."""
    rendered = [render_steps(rows[place], renderer) for place in places]
    batch = pack(
        [one.prompt + one.tokens for one in rendered],
        masks=[[False] * len(one.prompt) + [True] * len(one.tokens) for one in rendered],
        groups=list(range(len(rendered))),
        device=device,
    )
    score_mask, labels = torch.zeros(len(batch.tokens)), list[float]()
    offset = 0
    for one in rendered:
        for end, label in zip(one.ends, one.labels, strict=True):
            if label is not None:
                score_mask[offset + len(one.prompt) + end] = 1.0
                labels.append(label)
        offset += len(one.prompt) + len(one.tokens)
    if not labels:
        why = f"no step of these {len(rendered)} rows has a label"
        raise UserError("data.train_files", len(rendered), why, "drop rows without labels")
    numbers = {LABELS: torch.tensor(labels, device=device)}
    streamed = batch.with_streams(**{JUDGED: score_mask.to(device)})
    return OfflineBatch(rows=tuple(places), batch=streamed, numbers=numbers)


def _scored_at_the_end(batch: PackedBatch) -> PackedBatch:
    score_mask = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    score_mask[batch.layout.offsets[1:] - 1] = 1.0
    return batch.with_streams(**{JUDGED: score_mask})


def _rated_tokens(row: Rated, renderer: Renderer) -> tuple[tuple[int, ...], list[bool]]:
    """Tokens of the whole conversation, and the mask of its answers."""
    if isinstance(row, LabelledRow):
        answer = render_answer(row, renderer)
        return answer.tokens, [False] * len(answer.prompt) + list(answer.answer.mask)
    last = render_conversation(row, renderer)[-1]
    return last.rendered.tokens, [weight > 0 for weight in last.weights]


def target_of(row: Rated, target_key: str) -> float:
    """Target score of a row; a UserError where it has none."""
    found = row.extra_info.get(target_key)
    if isinstance(found, int | float) and math.isfinite(found):
        return float(found)
    if found is None and isinstance(row, LabelledRow):
        return float(row.label)
    why = f"a row gives {found!r} there, and a score to learn is a finite number"
    raise UserError(f"{BLOCK}.target_key", target_key, why, "name a column of numbers")


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
    """Reward model training: Bradley-Terry pairs, regression, or process labels."""

    def __init__(
        self,
        roles: OfflineRoles,
        data: OfflineData[Any],
        reward_training: RewardTrainingConfig,
        *,
        seed: int = 0,
    ) -> None:
        """`seed` is the run's: with the step it decides the masks of an adapter's dropout."""
        self.roles = roles
        self._trainer = RewardTrainer(
            roles,
            RewardObjective(
                name=reward_training.objective,
                center_rewards_coefficient=reward_training.center_rewards_coefficient,
            ),
        )
        self._data = data
        self._reward_training = reward_training
        self._seed = seed
        _demand_numbers((*data.train, *data.validation), reward_training)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Accuracy, or the absolute error for regression."""
        name = "absolute_error" if self._reward_training.objective == "regression" else "accuracy"
        label = _GOALS[name]
        return (
            Goal(metric=f"reward_model/{VALIDATION}{name}", label=f"held-out {label}"),
            Goal(metric=f"reward_model/{name}", label=label),
        )

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the rows at these indices, with the tokens that are scored."""
        return self._pack(self._data.train, rows)

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step."""
        key = dropout_key(self._seed, step)
        return self._trainer.update(offline_batch, lr=lr, dropout_key=key)

    def measure(self) -> dict[str, float]:
        """The metrics of a step, on all validation rows."""
        rows = self._data.validation
        if not rows:
            return {}
        found = self._trainer.measure(self._pack(rows, range(len(rows))))
        return validation_names(found)

    def state(self) -> dict[str, dict[str, Any]]:
        """Nothing: all is in weights and optimizer."""
        return {}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """There is nothing to restore."""

    def _pack(self, rows: Sequence[Any], places: Sequence[int]) -> OfflineBatch:
        renderer, reward_training = self._data.given.renderer, self._reward_training
        match reward_training.objective:
            case "bradley_terry":
                return pack_scored_pairs(
                    rows,
                    places,
                    renderer,
                    self.roles.device,
                    use_margins=reward_training.use_margins,
                )
            case "regression":
                return pack_rated(
                    rows, places, renderer, self.roles.device, target_key=reward_training.target_key
                )
            case "process":
                return pack_steps(rows, places, renderer, self.roles.device)


def _demand_numbers(rows: Sequence[Any], reward_training: RewardTrainingConfig) -> None:
    """A UserError, before the first step, where a row lacks its target or margin."""
    if reward_training.objective == "regression":
        for row in rows:
            target_of(row, reward_training.target_key)
    elif reward_training.objective == "bradley_terry" and reward_training.use_margins:
        for row in rows:
            margin_of(row, block=BLOCK)


def _worker(context: WorkerContext) -> OfflineWorker:
    """A reward model and its optimizer; a model without a score head gets a new one."""
    arr, seed = context.config.actor_rollout_ref, context.config.trainer.seed
    model = load_reward_model(arr.model, device=context.device, field=_FIELD, new_head=seed)
    choose_threads(model)
    if context.sharded is not None:
        context.sharded(model)
    optimizer = build_optimizer(model, arr.actor.optim, offload=context.offloads_optimizer)
    engine = RewardModelEngine(model, optimizer, device=context.here)
    return OfflineWorker(learner=engine, rank=context.rank)


def _build(context: StageContext) -> OfflineStage:
    config = context.config
    return RewardModelStage(
        context.roles, context.data, config.reward_training, seed=config.trainer.seed
    )


def _columns(config: RunConfig) -> tuple[str, ...]:
    training = config.reward_training
    return (training.target_key,) if training.objective == "regression" else ()


REWARD_MODEL = StageKind(
    kinds=lambda c: _KINDS[c.reward_training.objective],
    worker=_worker,
    build=_build,
    columns=_columns,
)
