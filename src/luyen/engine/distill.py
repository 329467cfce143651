"""Off-policy distillation: optimizer steps that match a teacher's distribution on given responses.

The divergence at a token is over the whole vocabulary. Logits of student and teacher exist for one
chunk of tokens at a time, and are recomputed for the gradient. Token weights are those of the whole
step, so the result does not depend on micro-batching.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from luyen.algorithms.distillation import row_divergences
from luyen.algorithms.statistic import Average
from luyen.engine.batch import PackedBatch
from luyen.engine.batch_shards import split_batch
from luyen.engine.step import LOSS_WEIGHT, UpdateResult, merge_updates, take_shard_step
from luyen.engine.supervised import SupervisedEngine
from luyen.models.head import Head, log_probabilities
from luyen.models.policy import Policy

_CHUNK_NUMBERS = 1 << 22
"""Most logits of student or teacher in memory at once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillObjective:
    """The loss of a token: divergence + nll_weight · negative log-likelihood.

    Example:
        >>> DistillObjective(divergence="jsd", beta=0.1).nll_weight
        0.0
    """

    divergence: str = "forward_kl"
    """Name of the divergence between student and teacher."""
    beta: float = 0.5
    """jsd: weight of the teacher in the mixture."""
    top_k: int = 64
    """topk_forward_kl: tokens of the teacher with their own probability."""
    temperature: float = 1.0
    """Divides the logits of both for the divergence; the likelihood is at temperature 1."""
    nll_weight: float = 0.0
    """Weight of the negative log-likelihood of the given responses."""

    def rows(
        self, student: Tensor, teacher: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, divergence and negative log-likelihood of each row of logits `[tok, vocab]`."""
        learned, taught = (log_probabilities(x / self.temperature) for x in (student, teacher))
        divergence = row_divergences(
            self.divergence, learned, taught, beta=self.beta, top_k=self.top_k
        )
        plain = learned if self.temperature == 1.0 else log_probabilities(student)
        nll = -plain.gather(-1, targets[:, None])[:, 0]
        loss = divergence + self.nll_weight * nll if self.nll_weight else divergence
        return loss, divergence.detach(), nll.detach()


@final
class DistillEngine:
    """A trained student and a frozen teacher."""

    def __init__(
        self, learner: SupervisedEngine, teacher: Policy, objective: DistillObjective
    ) -> None:
        self.learner = learner
        self.teacher = teacher
        self.objective = objective
        heads = (learner.policy.head.vocabulary, teacher.head.vocabulary)
        assert heads[0] == heads[1], f"vocabularies of {heads[0]} and {heads[1]} ids differ"

    def update(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step on the whole batch; the result does not depend on micro-batching."""
        learner = self.learner

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            loss, metrics = self._losses(part)
            return (part.streams[LOSS_WEIGHT] * loss).sum(), metrics

        (shard,) = shards = split_batch(learner.prepare_update(batch), learner.passes, ranks=1)
        here = shard.to(learner.policy.device)
        done = take_shard_step(learner.policy, learner.optimizer, here, part_loss, lr=lr)
        return merge_updates(shards, [done.to(batch.tokens.device)])

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> dict[str, float]:
        """Means over the trainable tokens of a batch, without an update."""
        batch = batch.to(self.learner.policy.device)
        (shard,) = split_batch(batch, self.learner.passes, ranks=1)
        merged: dict[str, Average] = {}
        for indices in shard.passes:
            for name, average in self._losses(batch.take(indices))[1].items():
                merged[name] = merged[name].merge(average) if name in merged else average
        return {name: average.value() for name, average in merged.items()}

    def _losses(self, part: PackedBatch) -> tuple[Tensor, dict[str, Average]]:
        """Loss of each token of a part, and its metrics."""
        where = part.layout.mask.nonzero()[:, 0]
        given = part.tokens, part.lengths, part.layout.mask, where - 1
        student = self.learner.policy.packed_hidden(*given)
        with torch.no_grad():
            teacher = self.teacher.packed_hidden(*given)
        found = by_chunks(
            self._rows, student, teacher, part.tokens[where], self.learner.policy.head
        )
        loss, divergence, nll = (part.scatter(x) for x in found)
        mask = part.layout.mask
        metrics = {
            "distill/divergence": Average.over(divergence, mask),
            "distill/nll": Average.over(nll, mask),
        }
        return loss, metrics

    def _rows(self, student: Tensor, teacher: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            taught = self.teacher.head.logits(teacher, temperature=1.0)
        learned = self.learner.policy.head.logits(student, temperature=1.0)
        return self.objective.rows(learned, taught, targets)


def by_chunks(
    rows: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    head: Head,
) -> list[Tensor]:
    """Apply `rows` to chunks of hidden states, which limits the memory of logits.

    With gradients and several chunks, each is recomputed in the backward pass.
    """
    size = max(1, _CHUNK_NUMBERS // head.vocabulary)
    is_kept = len(targets) <= size or not torch.is_grad_enabled()
    parts: list[tuple[Tensor, ...]] = []
    for chunk in zip(*(x.split(size) for x in (student, teacher, targets)), strict=True):
        parts.append(rows(*chunk) if is_kept else checkpoint(rows, *chunk, use_reentrant=False))
    return [torch.cat(column) for column in zip(*parts, strict=True)]
