"""The stages `sft` and `distill`: answers as targets, or a teacher's distribution on them."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.records import Source
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.formats.records import ConversationRow, TextRow
from luyen.data.formats.render import Weighted, render_conversation
from luyen.data.offline import OfflineData
from luyen.data.render import Rendered, Renderer
from luyen.engine.batch import OfflineBatch, PackedBatch, pack
from luyen.engine.distill import DistillEngine, DistillObjective
from luyen.engine.optim import MasterOptimizer, build_optimizer
from luyen.engine.step import UpdateResult
from luyen.engine.supervised import ACCURACY, TOKEN_WEIGHT, SupervisedEngine, TokenAggregation
from luyen.models.load import choose_threads
from luyen.models.policy import Policy
from luyen.runtime.offline import OfflineRoles, OfflineWorker
from luyen.train.builders.roles import initial_policy, load_teacher
from luyen.train.offline.stage import (
    Goal,
    OfflineStage,
    StageContext,
    StageKind,
    WorkerContext,
    dropout_key,
    validation_names,
)

Learnable = ConversationRow | TextRow


@final
class SftStage:
    """Supervised fine-tuning on assistant tokens."""

    goals = (
        Goal(metric="sft/val_nll", label="negative log-likelihood of held-out rows"),
        Goal(metric="sft/nll", label="negative log-likelihood"),
    )

    def __init__(
        self,
        roles: OfflineRoles,
        aggregation: TokenAggregation,
        data: OfflineData[Learnable],
        *,
        learn: str,
        seed: int = 0,
    ) -> None:
        """`seed` is the run's: with the step it decides the masks of an adapter's dropout."""
        self.roles = roles
        self._aggregation = aggregation
        self._data = data
        self._learn = learn
        self._seed = seed

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the rows at these indices."""
        chosen = [self._data.train[i] for i in rows]
        return OfflineBatch(rows=tuple(rows), batch=self._packed(chosen))

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step; adds the number of trained tokens to its metrics."""
        weighed = self._aggregation.weigh(offline_batch.batch)
        done = self.roles.update(weighed, lr=lr, dropout_key=dropout_key(self._seed, step))
        tokens = float(offline_batch.batch.layout.mask.sum())
        return UpdateResult(stepped=done.stepped, metrics={**done.metrics, "sft/tokens": tokens})

    def measure(self) -> dict[str, float]:
        """Mean negative log-likelihood and accuracy of the trained tokens, on validation rows."""
        if not self._data.validation:
            return {}
        batch = self._packed(self._data.validation)
        found = self.roles.scores(batch)
        means = {
            "sft/nll": -_mean(batch, found["logp"]),
            ACCURACY: _mean(batch, found["is_likeliest"]),
        }
        return validation_names(means)

    def state(self) -> dict[str, dict[str, Any]]:
        """Nothing: all is in weights and optimizer."""
        return {}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """There is nothing to restore."""

    def _packed(self, rows: Sequence[Learnable]) -> PackedBatch:
        renderer = self._data.given.renderer
        return pack_conversations(rows, renderer, self.roles.device, learn=self._learn)


def _mean(batch: PackedBatch, stream: Tensor) -> float:
    """The mean of a stream over the trained tokens."""
    return float(batch.layout.on_mask(stream).double().sum()) / int(batch.layout.mask.sum())


def build_learner(
    context: WorkerContext, *, loss: str = "nll", measures_accuracy: bool = False
) -> SupervisedEngine:
    """The policy with its optimizer."""
    policy, optimizer = learning_policy(context)
    return SupervisedEngine(
        policy, optimizer, loss=loss, measures_accuracy=measures_accuracy, device=context.here
    )


def learning_policy(context: WorkerContext) -> tuple[Policy, MasterOptimizer]:
    """The initial policy, and the optimizer of its weights or of this rank's shards."""
    policy = initial_policy(
        context.config, context.tokenizer, context.device, on_host=context.on_host
    )
    choose_threads(policy)
    if context.sharded is not None:
        context.sharded(policy)
    actor = context.config.actor_rollout_ref.actor
    return policy, build_optimizer(policy, actor.optim, offload=context.offloads_optimizer)


def token_aggregation(config: RunConfig) -> TokenAggregation:
    """The denominator of the loss."""
    actor = config.actor_rollout_ref.actor
    return TokenAggregation(
        mode=actor.loss_agg_mode or "token-mean",
        loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
    )


def pack_conversations(
    rows: Sequence[Learnable],
    renderer: Renderer,
    device: torch.device | str = "cpu",
    *,
    learn: str = "assistant",
) -> PackedBatch:
    """Pack conversations; `learn` says which of the assistant's tokens are trained on."""
    branches = [one for row in rows for one in _branches(row, renderer, learn)]
    weights = [one.weights for one in branches]
    batch = pack(
        [one.rendered.tokens for one in branches],
        masks=[[weight > 0 for weight in row] for row in weights],
        groups=list(range(len(branches))),
        device=device,
    )
    if not bool(batch.layout.mask.any()):
        why = f"no token of these {len(rows)} conversations is one to learn"
        raise UserError("data.train_files", len(rows), why, "add assistant messages")
    if all(weight in (0.0, 1.0) for row in weights for weight in row):
        return batch
    flat = torch.tensor([weight for row in weights for weight in row], device=device)
    return batch.with_streams(**{TOKEN_WEIGHT: flat})


def _branches(row: Learnable, renderer: Renderer, learn: str) -> Sequence[Weighted]:
    if isinstance(row, TextRow):
        return (_text(row.text, renderer),)
    branches = render_conversation(row, renderer)
    if learn == "assistant":
        return branches
    spoken = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    inputs = [i for i, message in enumerate(row.messages) if message["role"] != "assistant"]
    after = max((i for i in inputs if i < spoken[-1]), default=-1)
    first = len(spoken) - 1 if learn == "last_turn" else sum(i < after for i in spoken)
    return tuple(_from_turn(branch, first) for branch in branches)


def _from_turn(branch: Weighted, first: int) -> Weighted:
    """The branch with weight 0 on turns before `first`."""
    pairs = zip(branch.rendered.turns, branch.weights, strict=True)
    weights = tuple(weight if turn >= first else 0.0 for turn, weight in pairs)
    return Weighted(rendered=branch.rendered, weights=weights)


def _text(text: str, renderer: Renderer) -> Weighted:
    """Raw text with the end token, if any; its first token is not trained on."""
    end = renderer.tokenizer.end_id
    tokens = (*renderer.tokenizer.encode(text), *(() if end is None else (end,)))
    sources = (Source.PROMPT, *[Source.SAMPLED] * (len(tokens) - 1))
    rendered = Rendered(tokens=tokens, sources=sources, turns=(0,) * len(tokens))
    return Weighted(rendered=rendered, weights=(0.0, *[1.0] * (len(tokens) - 1)))


def _sft_worker(context: WorkerContext) -> OfflineWorker:
    learner = build_learner(context, loss=context.config.sft.loss, measures_accuracy=True)
    return OfflineWorker(learner=learner, rank=context.rank)


def _build_sft(context: StageContext) -> OfflineStage:
    config = context.config
    return SftStage(
        context.roles,
        token_aggregation(config),
        context.data,
        learn=config.sft.learn,
        seed=config.trainer.seed,
    )


SFT = StageKind(
    kinds=lambda _: (Kind.CONVERSATION, Kind.TEXT, Kind.PROMPTS),
    worker=_sft_worker,
    build=_build_sft,
)


@final
class DistillStage:
    """Distillation: match the teacher's distribution at each token of given answers."""

    goals = (
        Goal(metric="distill/val_divergence", label="divergence from the teacher, held-out rows"),
        Goal(metric="distill/divergence", label="divergence from the teacher"),
    )

    def __init__(
        self,
        roles: OfflineRoles,
        aggregation: TokenAggregation,
        data: OfflineData[Learnable],
        *,
        seed: int = 0,
    ) -> None:
        """`seed` is the run's: with the step it decides the masks of an adapter's dropout."""
        self.roles = roles
        self._aggregation = aggregation
        self._data = data
        self._seed = seed

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the rows at these indices."""
        chosen = [self._data.train[i] for i in rows]
        return OfflineBatch(rows=tuple(rows), batch=self._packed(chosen))

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step; adds the number of trained tokens to its metrics."""
        weighed = self._aggregation.weigh(offline_batch.batch)
        done = self.roles.update(weighed, lr=lr, dropout_key=dropout_key(self._seed, step))
        tokens = float(offline_batch.batch.layout.mask.sum())
        return UpdateResult(
            stepped=done.stepped, metrics={**done.metrics, "distill/tokens": tokens}
        )

    def measure(self) -> dict[str, float]:
        """The metrics of a step, on all validation rows."""
        if not self._data.validation:
            return {}
        batch = self._packed(self._data.validation)
        found = self.roles.scores(batch)
        return validation_names({f"distill/{name}": _mean(batch, x) for name, x in found.items()})

    def state(self) -> dict[str, dict[str, Any]]:
        """Nothing: all is in weights and optimizer, and the teacher is frozen."""
        return {}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """There is nothing to restore."""

    def _packed(self, rows: Sequence[Learnable]) -> PackedBatch:
        return pack_conversations(rows, self._data.given.renderer, self.roles.device)


def distill_objective(config: RunConfig) -> DistillObjective:
    """Objective of the stage."""
    distill = config.distill
    return DistillObjective(
        divergence=distill.divergence,
        beta=distill.beta,
        top_k=distill.top_k,
        temperature=distill.temperature,
        nll_weight=distill.nll_weight,
    )


def _distill_worker(context: WorkerContext) -> OfflineWorker:
    student, optimizer = learning_policy(context)
    teacher = load_teacher(
        context.config, context.tokenizer, context.device, on_host=context.on_host
    )
    engine = DistillEngine(
        student,
        optimizer,
        context.frozen(teacher).policy,
        distill_objective(context.config),
        device=context.here,
    )
    return OfflineWorker(learner=engine, rank=context.rank)


DISTILL = StageKind(
    kinds=lambda _: (Kind.CONVERSATION, Kind.TEXT, Kind.PROMPTS),
    worker=_distill_worker,
    build=lambda context: DistillStage(
        context.roles,
        token_aggregation(context.config),
        context.data,
        seed=context.config.trainer.seed,
    ),
)
