"""Preference optimization on pairs (the DPO family) and on unpaired responses (the KTO family).

A preference loss is a function of one sum of log-probabilities per sequence. A pass without
gradients computes all sums of the step, the loss its derivative by each of them, and a second pass
backpropagates with the derivative of its sequence as the weight of every token. So the gradient
does not depend on micro-batching, even between the two responses of a pair, and batch terms (KTO's
reference point, AOT's order) are over the whole step.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.preference.inputs import PairInputs, UnpairedInputs
from luyen.algorithms.preference.pointwise import step_rewards
from luyen.algorithms.preference.step import PreferenceObjective, StepCoefficients, sequence_sums
from luyen.engine.batch import OfflineBatch, PackedBatch
from luyen.engine.step import LOSS_WEIGHT, BatchLearner, UpdateResult

SequenceSums: TypeAlias = dict[str, Tensor]
"""Sum of log-probabilities of each sequence: of `batch`, and of each batch in `aside`."""
MARGINS, DESIRABLE, MISMATCHED = "margins", "desirable", "mismatched"


@final
class PreferenceTrainer:
    """Whole optimizer steps of a policy on a preference objective."""

    def __init__(self, learner: BatchLearner, objective: PreferenceObjective) -> None:
        self.learner = learner
        self.objective = objective
        self.reference: Callable[[OfflineBatch], SequenceSums] | None = None
        """Computes the sums of the reference policy; None: the objective needs no reference."""
        self.history: Average | None = None
        """Running mean of implicit rewards (bco)."""

    def update(
        self, offline_batch: OfflineBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        """One optimizer step on the whole batch.

        Log-probabilities have the masks of the update, which `dropout_key` decides where the
        adapter has dropout; without it the result does not depend on micro-batching.
        """
        found, inputs = self._evaluate(offline_batch, dropout_key)
        weights = self._token_weights(offline_batch)
        per_sequence = -_by_sequence(found, offline_batch.batch)
        per_token = offline_batch.batch.layout.spread(per_sequence)
        if weights is not None:
            per_token = per_token * weights
        prepared = offline_batch.batch.with_streams(**{LOSS_WEIGHT: per_token.float()})
        done = self.learner.update(prepared, lr=lr, dropout_key=dropout_key)
        if self.objective.reads("history") and isinstance(inputs, UnpairedInputs):
            self.history = step_rewards(inputs, float(self.objective.hparams.get("beta", 0.1)))
        return replace(done, metrics=_values(found))

    @torch.no_grad()
    def measure(self, offline_batch: OfflineBatch) -> dict[str, float]:
        """Loss, accuracy and rewards of a batch, without an update."""
        return _values(self._evaluate(offline_batch)[0])

    def _evaluate(
        self, offline_batch: OfflineBatch, dropout_key: int | None = None
    ) -> tuple[StepCoefficients, PairInputs | UnpairedInputs]:
        def scores(batch: PackedBatch) -> Mapping[str, Tensor]:
            # Only what is learned has masks; mismatched answers are a constant of the loss.
            is_learned = batch is offline_batch.batch
            return self.learner.scores(batch, dropout_key=dropout_key if is_learned else None)

        sums = self.sums(scores, offline_batch)
        inputs = self._inputs(offline_batch, sums)
        return self.objective.coefficients(inputs), inputs

    def sums(
        self, scores: Callable[[PackedBatch], Mapping[str, Tensor]], offline_batch: OfflineBatch
    ) -> SequenceSums:
        """Sums of the log-probabilities `logp` of `scores`, with the token weights."""
        weights = {"batch": self._token_weights(offline_batch)}
        return {
            name: sequence_sums(scores(batch)["logp"], batch.layout, weights.get(name))
            for name, batch in {"batch": offline_batch.batch, **offline_batch.aside}.items()
        }

    def _token_weights(self, offline_batch: OfflineBatch) -> Tensor | None:
        if self.objective.kind != "pair":
            return None
        lengths = offline_batch.batch.layout.lengths()
        shorter = torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)
        return self.objective.token_weights(offline_batch.batch.layout, shorter)

    def _inputs(
        self, offline_batch: OfflineBatch, sums: SequenceSums
    ) -> PairInputs | UnpairedInputs:
        known = self.reference(offline_batch) if self.reference is not None else {}
        logp, ref = sums["batch"], known.get("batch")
        if self.objective.kind == "pair":
            lengths = offline_batch.batch.layout.lengths()
            return PairInputs(
                chosen=logp[0::2],
                rejected=logp[1::2],
                chosen_tokens=lengths[0::2],
                rejected_tokens=lengths[1::2],
                ref_chosen=None if ref is None else ref[0::2],
                ref_rejected=None if ref is None else ref[1::2],
                margins=offline_batch.numbers.get(MARGINS),
            )
        assert ref is not None, "unpaired losses need a reference"
        return UnpairedInputs(
            logp=logp,
            ref_logp=ref,
            desirable=offline_batch.numbers[DESIRABLE],
            mismatched=sums.get(MISMATCHED),
            ref_mismatched=known.get(MISMATCHED),
            history=self.history,
        )


def _by_sequence(found: StepCoefficients, batch: PackedBatch) -> Tensor:
    """The derivative of the loss by the sum of each sequence, in order."""
    if "logp" in found.by:
        return found.by["logp"]
    together = torch.stack((found.by["chosen"], found.by["rejected"]), dim=1)
    assert together.numel() == len(batch.lengths), "a pair is two sequences"
    return together.reshape(-1)


def _values(found: StepCoefficients) -> dict[str, float]:
    """Means over the step, without metrics that count nothing."""
    counted = {name: a for name, a in found.metrics.items() if float(a.count) > 0}
    return {name: average.value() for name, average in counted.items()}
