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

from luyen.algorithms.aggregation import Average
from luyen.algorithms.distillation import row_divergences
from luyen.base.heartbeat import beat
from luyen.engine.batch import BatchShard, PackedBatch
from luyen.engine.fsdp import dummy_loss, reshard
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import LOSS_WEIGHT, ShardUpdateResult, take_shard_step
from luyen.models.adapter_dropout import PassMasks
from luyen.models.head import Head, log_probabilities
from luyen.models.policy import Policy

DIVERGENCE, NLL = "divergence", "nll"
"""Streams: divergence from the teacher, and negative log-likelihood, of each trained token."""
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
    """A student with its optimizer, and a frozen teacher; whole, or this rank's shards of both."""

    def __init__(
        self,
        student: Policy,
        optimizer: MasterOptimizer,
        teacher: Policy,
        objective: DistillObjective,
        *,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where passes run, if not where the weights are (they may be offloaded)."""
        self.student = student
        self.optimizer = optimizer
        self.teacher = teacher
        self.objective = objective
        self._device = device
        heads = (student.head.vocabulary, teacher.head.vocabulary)
        assert heads[0] == heads[1], f"vocabularies of {heads[0]} and {heads[1]} ids differ"

    @property
    def model(self) -> Policy:
        """The student."""
        return self.student

    def update_shard(
        self, shard: BatchShard, *, lr: float, dropout_key: int | None = None
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch of `TokenAggregation.weigh`."""
        masks = PassMasks(self.student, dropout_key)

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            masks.begin()
            loss, divergence, nll = self._losses(part)
            mask = part.layout.mask
            metrics = {
                f"distill/{DIVERGENCE}": Average.over(divergence, mask),
                f"distill/{NLL}": Average.over(nll, mask),
            }
            return (part.streams[LOSS_WEIGHT] * loss).sum(), metrics

        home, here = shard.batch.tokens.device, shard.to(self._device or self.student.device)
        done = take_shard_step(
            self.student, self.optimizer, here, part_loss, lr=lr, dummy=self._dummy_loss
        )
        reshard(self.teacher)
        return done.to(home)

    @torch.no_grad()
    def score_shard(
        self, shard: BatchShard, *, dropout_key: int | None = None
    ) -> dict[str, Tensor]:
        """The streams `divergence` and `nll` over the tokens of a shard."""
        masks = PassMasks(self.student, dropout_key)
        with masks.in_scores():
            return self._scores(shard, masks)

    def _scores(self, shard: BatchShard, masks: PassMasks) -> dict[str, Tensor]:
        home, here = shard.batch.tokens.device, self._device or self.student.device
        batch = shard.to(here).batch
        found = {name: torch.zeros(batch.tokens.shape, device=here) for name in (DIVERGENCE, NLL)}
        for indices in shard.passes:
            if not indices:
                self._dummy_loss()
                continue
            masks.begin()
            place = batch.positions(indices)
            _, divergence, nll = self._losses(batch.take(indices, place))
            found[DIVERGENCE][place], found[NLL][place] = divergence.float(), nll.float()
            beat()
        reshard(self.student)
        reshard(self.teacher)
        return {name: stream.to(home) for name, stream in found.items()}

    def _losses(self, part: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, divergence and negative log-likelihood of each token of a part."""
        where = part.layout.mask.nonzero()[:, 0]
        given = part.tokens, part.lengths, part.layout.mask, where - 1
        with torch.no_grad():
            # The teacher's head stays gathered until it is resharded: the student's pass reads it.
            teacher = self.teacher.from_hidden(*given, lambda hidden: hidden)
        targets = part.tokens[where]

        def rows(hidden: Tensor) -> list[Tensor]:
            return by_chunks(self._rows, hidden, teacher, targets, self.student.head)

        loss, divergence, nll = self.student.from_hidden(*given, rows)
        return part.scatter(loss), part.scatter(divergence), part.scatter(nll)

    def _dummy_loss(self) -> Tensor:
        """Both models make their collectives, in the order of `_losses`."""
        here = self._device or self.student.device
        with torch.no_grad():
            dummy_loss(self.teacher, here)
        return dummy_loss(self.student, here)

    def _rows(self, student: Tensor, teacher: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            taught = self.teacher.head.logits(teacher, temperature=1.0)
        learned = self.student.head.logits(student, temperature=1.0)
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
