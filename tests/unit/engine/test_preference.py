"""Preference steps: the gradient is autograd's of the whole step, for any cut into passes."""

from typing import Any, cast

import pytest
import torch

from luyen.algorithms.preference.inputs import PairInputs, UnpairedInputs
from luyen.algorithms.preference.step import PreferenceObjective, sequence_sums, step_mean
from luyen.config.catalog import PREFERENCE_LOSSES
from luyen.engine.batch import MicroBatching, OfflineBatch, PackedBatch, pack
from luyen.engine.logprobs import score
from luyen.engine.optim import MasterOptimizer
from luyen.engine.preference import DESIRABLE, MISMATCHED, PreferenceTrainer
from luyen.engine.supervised import SupervisedEngine
from tests.tiny_models import tiny_policy
from tests.unit.engine.steps import OPTIM, PASSES, whole
from tests.unit.engine.test_updates import gradient

ROWS = ([5, 6, 7, 8], [5, 6, 9], [4, 3, 2, 1, 2], [4, 3, 8, 8, 8, 8], [7, 7, 1], [7, 7, 2, 2])
"""Three pairs; the first two tokens of each are its prompt."""


def packed(rows) -> object:
    masks = [[i >= 2 for i in range(len(row))] for row in rows]
    return pack(rows, masks=masks, groups=[i // 2 for i in range(len(rows))])


def offline_batch(kind: str, *, is_mismatched: bool = False) -> OfflineBatch:
    aside = {MISMATCHED: packed([[*row[:2], *ROWS[i - 2][2:]] for i, row in enumerate(ROWS)])}
    return OfflineBatch(
        rows=(0, 1, 2),
        batch=packed(ROWS),
        aside=aside if is_mismatched else {},
        numbers={} if kind == "pair" else {DESIRABLE: torch.tensor([True, False] * 3)},
    )


def engine_of(passes: MicroBatching, objective: PreferenceObjective) -> PreferenceTrainer:
    policy, reference = tiny_policy(initializer_range=0.1), tiny_policy(seed=3)
    learner = SupervisedEngine(policy, MasterOptimizer(policy.parameters(), OPTIM))
    engine = PreferenceTrainer(whole(learner, passes), objective)

    def scores(batch: PackedBatch) -> dict[str, torch.Tensor]:
        return score(reference, batch, passes, temperature=1.0)

    if objective.needs_reference:
        engine.reference = lambda given: engine.sums(scores, given)
    return engine


def learner_of(engine: PreferenceTrainer) -> Any:
    return cast(Any, engine.learner).workers.worker.learner


def taken(
    passes: MicroBatching, objective: PreferenceObjective
) -> tuple[torch.Tensor, dict[str, float]]:
    engine = engine_of(passes, objective)
    given = offline_batch(objective.kind, is_mismatched="kto" in objective.losses)
    held = {}

    def update(_: object):
        held["done"] = engine.update(given, lr=0.01)
        return held["done"]

    return gradient(learner_of(engine), update), dict(held["done"].metrics)


def autograd(objective: PreferenceObjective) -> torch.Tensor:
    """The gradient of the loss, differentiated through one pass over the whole step."""
    engine = engine_of(PASSES["all at once"], objective)
    given = offline_batch(objective.kind, is_mismatched="kto" in objective.losses)
    policy, batch = learner_of(engine).policy, given.batch
    known = engine.reference(given) if engine.reference is not None else {}
    scored = policy(batch.tokens, batch.lengths, batch.layout.mask)
    weights = engine._token_weights(given)
    sums = sequence_sums(batch.scatter(scored.logp), batch.layout, weights)
    ref, lengths = known.get("batch"), batch.layout.lengths()
    if objective.kind == "pair":
        inputs = PairInputs(
            chosen=sums[0::2],
            rejected=sums[1::2],
            chosen_tokens=lengths[0::2],
            rejected_tokens=lengths[1::2],
            ref_chosen=None if ref is None else ref[0::2],
            ref_rejected=None if ref is None else ref[1::2],
        )
    else:
        others = engine.sums(engine.learner.scores, given).get(MISMATCHED)
        inputs = UnpairedInputs(
            logp=sums,
            ref_logp=ref,
            desirable=given.numbers[DESIRABLE],
            mismatched=others,
            ref_mismatched=known.get(MISMATCHED),
        )
    step_mean(objective(inputs).loss).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()]).double()


OBJECTIVES = {name: PreferenceObjective(losses=(name,)) for name in PREFERENCE_LOSSES} | {
    "mixture": PreferenceObjective(losses=("sigmoid", "aot", "sft"), loss_weights=(0.5, 1.0, 0.2)),
    "lighter tail": PreferenceObjective(losses=("sigmoid",), ld_alpha=0.3),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_cut_gives_the_gradient_of_the_whole_step(name: str):
    objective = OBJECTIVES[name]
    expected = autograd(objective)
    assert expected.norm() > 1e-5
    for cut in ("all at once", "one by one", "by tokens"):
        found, metrics = taken(PASSES[cut], objective)
        assert (found - expected).norm() < 2e-5 * expected.norm(), cut
        assert metrics["preference/loss"] == metrics["preference/loss"]


def test_metrics_are_of_the_whole_step():
    objective = OBJECTIVES["sigmoid"]
    one, other = (taken(PASSES[cut], objective)[1] for cut in ("all at once", "one by one"))
    assert one == pytest.approx(other, rel=1e-5)
    assert set(one) >= {"preference/accuracy", "preference/margin", "preference/chosen_logp"}


def test_a_policy_that_is_its_reference_is_right_half_of_the_time():
    objective = OBJECTIVES["sigmoid"]
    engine = engine_of(PASSES["all at once"], objective)
    engine.reference = lambda given: engine.sums(engine.learner.scores, given)
    found = engine.measure(offline_batch("pair"))
    assert found["preference/accuracy"] == 0.5
    assert found["preference/loss"] == pytest.approx(0.6931472, rel=1e-6)


def test_bco_remembers_the_rewards_of_earlier_steps():
    engine = engine_of(PASSES["all at once"], OBJECTIVES["bco"])
    given = offline_batch("unpaired")
    engine.update(given, lr=0.01)
    assert engine.history is not None
    first = float(engine.history.count)
    engine.update(given, lr=0.01)
    assert float(engine.history.count) == 2 * first == 12
