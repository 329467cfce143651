"""Every policy loss under every aggregation: split, order and padding do not matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.algorithms import padded
from luyen.algorithms.aggregation import AGGREGATIONS
from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import policy_losses
from tests.laws.steps import CASES, STREAMS, Case, Sample, evaluate, make_sample, same, steps

few = settings(max_examples=3, deadline=None, derandomize=True, database=None)
everywhere = pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
for_every_loss = pytest.mark.parametrize("case", CASES, ids=str)


def objective_of(case: Case, mode: str) -> Objective:
    return Objective(
        loss=case.loss,
        hparams=case.hparams,
        aggregation=mode,
        loss_scale_factor=11.0,
        entropy_coeff=0.01,
        kl_loss_coef=0.1,
        kl_loss_type="k3+",
    )


def whole(samples: list[Sample]) -> list[list[int]]:
    return [list(range(len(samples)))]


def masked_sample(seed: int, length: int) -> Sample:
    sample = make_sample(torch.Generator().manual_seed(seed), length)
    return {**sample, "mask": torch.zeros(length, dtype=torch.bool)}


def poisoned(sample: Sample) -> Sample:
    bad = {k: torch.where(sample["mask"], sample[k], torch.nan) for k in STREAMS}
    return {**bad, "mask": sample["mask"]}


def test_the_laws_cover_every_registered_loss():
    assert {case.loss for case in CASES} == set(policy_losses)


@for_every_loss
@everywhere
@few
@given(samples=steps, data=st.data())
def test_any_split_gives_the_same_loss_and_gradient(case, mode, samples, data):
    rank = data.draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))
    parts = [[i for i, r in enumerate(rank) if r == part] for part in range(4)]
    objective = objective_of(case, mode)
    same(evaluate(objective, samples, parts), evaluate(objective, samples, whole(samples)))


@for_every_loss
@everywhere
@few
@given(samples=steps, data=st.data())
def test_the_order_of_sequences_does_not_matter(case, mode, samples, data):
    order = data.draw(st.permutations(range(len(samples))))
    objective = objective_of(case, mode)
    shuffled = [samples[i] for i in order]
    loss, gradients = evaluate(objective, shuffled, whole(shuffled))
    back = [gradients[order.index(i)] for i in range(len(samples))]
    same((loss, back), evaluate(objective, samples, whole(samples)))


@for_every_loss
@everywhere
@few
@given(samples=steps, place=st.integers(0, 2), length=st.integers(1, 5))
def test_a_fully_masked_sequence_changes_nothing(case, mode, samples, place, length):
    objective = objective_of(case, mode)
    more = [*samples[:place], masked_sample(place, length), *samples[place:]]
    loss, gradients = evaluate(objective, more, whole(more))
    assert not gradients.pop(place).any()
    same((loss, gradients), evaluate(objective, samples, whole(samples)))


@for_every_loss
@everywhere
@few
@given(samples=steps)
def test_nan_on_masked_tokens_changes_nothing_and_gets_no_gradient(case, mode, samples):
    objective = objective_of(case, mode)
    bad = [poisoned(sample) for sample in samples]
    got = evaluate(objective, bad, whole(bad))
    same(got, evaluate(objective, samples, whole(samples)))
    for gradient, sample in zip(got[1], samples, strict=True):
        assert not gradient[~sample["mask"]].any()


@for_every_loss
@everywhere
@few
@given(samples=steps, left=st.booleans())
def test_padded_rows_give_the_packed_loss_and_gradient(case, mode, samples, left):
    width = max(len(s["mask"]) for s in samples) + 2
    flat = Objective(loss=case.loss, hparams=case.hparams, aggregation=mode, loss_scale_factor=11.0)
    expected, gradients = evaluate(flat, samples, whole(samples))

    def rows(name: str, fill: float) -> torch.Tensor:
        out = torch.full((len(samples), width), fill, dtype=torch.float64)
        for row, sample in zip(out, samples, strict=True):
            row[span(sample)] = sample[name].double()
        return out

    def span(sample: Sample) -> slice:
        length = len(sample["mask"])
        return slice(width - length, None) if left else slice(0, length)

    logp = rows("logp", torch.nan).requires_grad_()
    loss, _ = padded.policy_loss(
        case.loss,
        logp,
        rows("old_logp", torch.nan),
        rows("advantages", torch.nan),
        rows("mask", 0.0),
        aggregation=mode,
        loss_scale_factor=11.0,
        rollout_logp=rows("rollout_logp", torch.nan),
        rollout_is_weights=rows("is_weights", torch.nan),
        seed=3,
        **case.hparams,
    )
    (grad,) = torch.autograd.grad(loss, [logp])
    got = [row[span(sample)] for row, sample in zip(grad, samples, strict=True)]
    same((loss.detach(), got), (expected, gradients))
