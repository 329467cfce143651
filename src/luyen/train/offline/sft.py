"""The stages `sft` and `distill`: answers as targets, or a teacher's distribution on them."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from luyen.base.errors import UserError
from luyen.base.records import Source
from luyen.base.seeds import derive_key
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.formats.records import ConversationRow, TextRow
from luyen.data.formats.render import Weighted, render_conversation
from luyen.data.offline import OfflineData
from luyen.data.render import Rendered, Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.engine.batch import OfflineBatch, PackedBatch, pack
from luyen.engine.distill import DistillEngine, DistillObjective
from luyen.engine.logprobs import score
from luyen.engine.optim import build_optimizer
from luyen.engine.step import UpdateResult
from luyen.engine.supervised import ACCURACY, TOKEN_WEIGHT, SupervisedEngine
from luyen.models.load import choose_threads
from luyen.models.trained_weights import restore_parameters, trained_parameters
from luyen.train.builders.roles import actor_passes, initial_policy, load_teacher
from luyen.train.offline.stage import Goal, OfflineStage, StageContext, StageKind, validation_names

Learnable = ConversationRow | TextRow


@final
class SftStage:
    """Supervised fine-tuning on assistant tokens."""

    goals = (
        Goal(metric="sft/val_nll", label="negative log-likelihood of held-out rows"),
        Goal(metric="sft/nll", label="negative log-likelihood"),
    )

    def __init__(
        self, engine: SupervisedEngine, data: OfflineData[Learnable], *, learn: str, seed: int = 0
    ) -> None:
        """`seed` is the run's: with the step it decides the masks of an adapter's dropout."""
        self._engine = engine
        self._data = data
        self._learn = learn
        self._seed = seed

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._engine.policy.device

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the rows at these indices."""
        chosen = [self._data.train[i] for i in rows]
        return OfflineBatch(rows=tuple(rows), batch=self._packed(chosen))

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step; adds the number of trained tokens to its metrics."""
        key = derive_key(self._seed, "adapter dropout", step)
        done = self._engine.update(offline_batch.batch, lr=lr, dropout_key=key)
        tokens = float(offline_batch.batch.layout.mask.sum())
        return UpdateResult(stepped=done.stepped, metrics={**done.metrics, "sft/tokens": tokens})

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Mean negative log-likelihood and accuracy of the trained tokens, on validation rows."""
        if not self._data.validation:
            return {}
        batch = self._packed(self._data.validation)
        found = score(
            self._engine.policy, batch, self._engine.passes, temperature=1.0, likeliest=True
        )
        logp, right = (batch.layout.on_mask(found[n]) for n in ("logp", "is_likeliest"))
        count = int(batch.layout.mask.sum())
        means = {
            "sft/nll": -float(logp.double().sum()) / count,
            ACCURACY: float(right.double().sum()) / count,
        }
        return validation_names(means)

    def state(self) -> dict[str, Any]:
        """Weights and optimizer."""
        return actor_state(self._engine)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore weights and optimizer."""
        restore_actor(self._engine, state)

    def _packed(self, rows: Sequence[Learnable]) -> PackedBatch:
        renderer = self._data.given.renderer
        return pack_conversations(rows, renderer, self.device, learn=self._learn)


def actor_state(engine: SupervisedEngine) -> dict[str, Any]:
    """Weights and optimizer of a policy for a checkpoint."""
    return {
        "actor": trained_parameters(engine.policy),
        "actor_optimizer": engine.optimizer.state_dict(),
    }


def restore_actor(engine: SupervisedEngine, state: Mapping[str, Any]) -> None:
    """Restore what `actor_state` returned."""
    restore_parameters(engine.policy, state["actor"])
    engine.optimizer.load_state_dict(state["actor_optimizer"])


def build_learner(
    config: RunConfig,
    tokenizer: Tokenizer,
    device: str,
    *,
    loss: str = "nll",
    measures_accuracy: bool = False,
) -> SupervisedEngine:
    """The policy with its optimizer."""
    arr = config.actor_rollout_ref
    policy = initial_policy(config, tokenizer, device)
    choose_threads(policy)
    return SupervisedEngine(
        policy,
        build_optimizer(policy, arr.actor.optim),
        actor_passes(arr.actor),
        aggregation=arr.actor.loss_agg_mode or "token-mean",
        loss_scale_factor=arr.actor.loss_scale_factor or float(config.data.max_response_length),
        loss=loss,
        measures_accuracy=measures_accuracy,
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


def _build_sft(context: StageContext) -> OfflineStage:
    loss, learn = context.config.sft.loss, context.config.sft.learn
    learner = build_learner(
        context.config, context.tokenizer, context.device, loss=loss, measures_accuracy=True
    )
    seed = context.config.trainer.seed
    return SftStage(learner, context.data, learn=learn, seed=seed)


SFT = StageKind(kinds=lambda _: (Kind.CONVERSATION, Kind.TEXT, Kind.PROMPTS), build=_build_sft)


@final
class DistillStage:
    """Distillation: match the teacher's distribution at each token of given answers."""

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

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the rows at these indices."""
        chosen = [self._data.train[i] for i in rows]
        return OfflineBatch(rows=tuple(rows), batch=self._packed(chosen))

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step; adds the number of trained tokens to its metrics."""
        del step  # nothing here is random
        done = self._engine.update(offline_batch.batch, lr=lr)
        tokens = float(offline_batch.batch.layout.mask.sum())
        return UpdateResult(
            stepped=done.stepped, metrics={**done.metrics, "distill/tokens": tokens}
        )

    def measure(self) -> dict[str, float]:
        """The metrics of a step, on all validation rows."""
        if not self._data.validation:
            return {}
        found = self._engine.measure(self._packed(self._data.validation))
        return validation_names(found)

    def state(self) -> dict[str, Any]:
        """Weights and optimizer of the student; the frozen teacher is not saved."""
        return actor_state(self._engine.learner)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore weights and optimizer."""
        restore_actor(self._engine.learner, state)

    def _packed(self, rows: Sequence[Learnable]) -> PackedBatch:
        return pack_conversations(rows, self._data.given.renderer, self.device)


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


def _build_distill(context: StageContext) -> OfflineStage:
    config = context.config
    learner = build_learner(config, context.tokenizer, context.device)
    teacher = load_teacher(config, context.tokenizer, context.device)
    return DistillStage(DistillEngine(learner, teacher, distill_objective(config)), context.data)


DISTILL = StageKind(
    kinds=lambda _: (Kind.CONVERSATION, Kind.TEXT, Kind.PROMPTS), build=_build_distill
)
