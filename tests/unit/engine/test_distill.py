"""A student beside a teacher: the gradient is right, whole, and only the student's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import luyen.engine.distill as module
from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.distillation import (
    forward_kl,
    forward_kl_topk,
    generalised_jsd,
    reverse_kl,
    row_divergences,
)
from luyen.algorithms.layout import Layout
from luyen.engine.batch import MicroBatching, PackedBatch
from luyen.engine.distill import DIVERGENCE, DistillEngine, DistillObjective
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import UpdateResult
from luyen.engine.supervised import TOKEN_WEIGHT, TokenAggregation
from luyen.models.policy import Policy
from tests.tiny_models import VOCABULARY, tiny_policy
from tests.unit.engine.steps import OPTIM, PASSES, recorded, whole
from tests.unit.engine.test_updates import gradient

OBJECTIVES = {
    "reverse": DistillObjective(divergence="reverse_kl"),
    "forward": DistillObjective(divergence="forward_kl", temperature=2.0),
    "between": DistillObjective(divergence="jsd", beta=0.3, nll_weight=0.5),
    "top": DistillObjective(divergence="topk_forward_kl", top_k=5, temperature=0.5, nll_weight=2.0),
}


def teacher() -> Policy:
    return tiny_policy("qwen2", initializer_range=0.2, seed=9).requires_grad_(False)


def engine(objective: DistillObjective) -> DistillEngine:
    policy = tiny_policy(initializer_range=0.1)
    return DistillEngine(policy, MasterOptimizer(policy.parameters(), OPTIM), teacher(), objective)


def weighed(batch: Any = None) -> PackedBatch:
    return TokenAggregation().weigh(recorded() if batch is None else batch)


def step(
    passes: MicroBatching, objective: DistillObjective, batch: Any = None
) -> tuple[Tensor, UpdateResult]:
    made, held = engine(objective), []

    def update(_: DistillEngine) -> UpdateResult:
        held.append(whole(made, passes).update(weighed(batch), lr=0.01))
        return held[0]

    return gradient(made, update), held[0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_do_not_change_the_gradient(name: str):
    uncut, done = step(PASSES["all at once"], OBJECTIVES[name])
    assert uncut.norm() > 1e-3
    for passes in list(PASSES.values())[:3]:
        parts, again = step(passes, OBJECTIVES[name])
        assert (parts - uncut).norm() < 1e-6 * uncut.norm()
        assert again.metrics == pytest.approx(dict(done.metrics), rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunks_over_the_vocabulary_do_not_change_the_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    uncut, _ = step(PASSES["all at once"], OBJECTIVES[name])
    monkeypatch.setattr(module, "_CHUNK_NUMBERS", 7 * VOCABULARY)
    cut, _ = step(PASSES["all at once"], OBJECTIVES[name])
    assert (cut - uncut).norm() < 1e-6 * uncut.norm()


def plain_rows(policy: Policy, tokens: Tensor) -> Tensor:
    """Logits before each token of one sequence, by transformers alone."""
    policy.model.set_attn_implementation("eager")
    return policy.model(input_ids=tokens[None]).logits[0, :-1, :VOCABULARY].double()


def by_hand(objective: DistillObjective, student: Tensor, taught: Tensor, ids: Tensor) -> Tensor:
    """The loss of each row, written out as sums over the vocabulary, in float64."""
    s = torch.softmax(student / objective.temperature, -1)
    t = torch.softmax(taught / objective.temperature, -1)
    nll = -torch.log_softmax(student, -1).gather(-1, ids[:, None])[:, 0]
    match objective.divergence:
        case "reverse_kl":
            gap = (s * (s.log() - t.log())).sum(-1)
        case "forward_kl":
            gap = (t * (t.log() - s.log())).sum(-1)
        case "jsd":
            m = objective.beta * t + (1 - objective.beta) * s
            gap = objective.beta * (t * (t / m).log()).sum(-1)
            gap = gap + (1 - objective.beta) * (s * (s / m).log()).sum(-1)
        case _:
            top, place = t.topk(objective.top_k, -1)
            mine = s.gather(-1, place)
            gap = (top * (top / mine).log()).sum(-1)
            rest, left = 1 - top.sum(-1), 1 - mine.sum(-1)
            gap = gap + rest * (rest / left).log()
    return gap + objective.nll_weight * nll


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_formula_in_plain_transformers(name: str):
    batch, objective = recorded(), OBJECTIVES[name]
    found, _ = step(PASSES["by tokens"], objective, batch)
    student, frozen = tiny_policy(initializer_range=0.1), teacher()
    loss, start = torch.zeros((), dtype=torch.float64), 0
    for length in batch.lengths:
        tokens = batch.tokens[start : start + length]
        mask = batch.layout.mask[start : start + length][1:]
        start += length
        rows = by_hand(
            objective, plain_rows(student, tokens), plain_rows(frozen, tokens), tokens[1:]
        )
        loss = loss + rows[mask].sum()
    (loss / batch.layout.mask.sum()).backward()
    expected = torch.cat(
        [p.grad.flatten() for p in student.parameters() if p.grad is not None]
    ).double()
    assert (found - expected).norm() < 2e-5 * expected.norm()


def test_the_teacher_stays_as_it_is_and_gets_no_gradient():
    made = engine(OBJECTIVES["reverse"])
    made.teacher.requires_grad_(True)
    before = {name: p.clone() for name, p in made.teacher.named_parameters()}
    whole(made, PASSES["by tokens"]).update(weighed(), lr=0.1)
    for name, parameter in made.teacher.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    made = engine(OBJECTIVES["forward"])
    made.teacher = made.student
    found = whole(made, PASSES["by tokens"]).scores(recorded())[DIVERGENCE]
    assert float(found.abs().max()) == pytest.approx(0.0, abs=1e-6)


def test_a_measurement_is_what_a_step_reports_of_its_beginning():
    roles, batch = whole(engine(OBJECTIVES["between"]), PASSES["three at once"]), weighed()
    found = roles.scores(batch)
    means = {f"distill/{n}": float(x[batch.layout.mask].mean()) for n, x in found.items()}
    assert roles.update(batch, lr=0.01).metrics == pytest.approx(means, rel=1e-5)


def test_tokens_that_count_less_pull_less():
    batch = recorded()
    light = torch.where(torch.arange(len(batch.tokens)) < len(batch.tokens) // 2, 0.1, 1.0)
    weighted = batch.with_streams(**{TOKEN_WEIGHT: light})
    one, other = (step(PASSES["by tokens"], OBJECTIVES["reverse"], b)[0] for b in (batch, weighted))
    assert (one - other).norm() > 1e-2 * one.norm()
    weights = aggregation_weights("token-mean", batch.layout)
    prepared = TokenAggregation().weigh(weighted)
    assert float(prepared.streams["loss_weight"].sum()) == pytest.approx(float(weights.sum()))


def test_rows_by_name_are_the_functions_of_the_mathematics():
    draw = torch.Generator().manual_seed(3)
    s, t = (torch.randn(6, 9, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in "st")
    layout = Layout(
        mask=torch.ones(6, dtype=torch.bool),
        offsets=torch.tensor([0, 6]),
        groups=torch.tensor([0]),
    )
    top = t.topk(4, -1)
    expected = {
        "reverse_kl": reverse_kl(s, t, layout),
        "forward_kl": forward_kl(s, t, layout),
        "jsd": generalised_jsd(s, t, layout, beta=0.2),
        "topk_forward_kl": forward_kl_topk(s, top.indices, top.values, layout),
    }
    for name, loss in expected.items():
        found = row_divergences(name, s, t, beta=0.2, top_k=4)
        torch.testing.assert_close(found, loss.per_token, rtol=0, atol=1e-14)
    for beta, name in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        found = row_divergences("jsd", s, t, beta=beta, top_k=4)
        torch.testing.assert_close(found, expected[name].per_token, rtol=0, atol=1e-14)
