"""Every preference loss: cut, order and width do not matter, also where it looks at the step."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms import padded
from luyen.algorithms.layout import Layout
from luyen.algorithms.preference import (
    PairInputs,
    PreferenceObjective,
    UnpairedInputs,
    preference_losses,
)
from luyen.algorithms.preference.step import sequence_sums, step_mean
from tests.architecture.registered import ours

few = settings(max_examples=5, deadline=None, derandomize=True, database=None)
STEP = st.tuples(st.integers(1, 7), st.integers(0, 2**31 - 1))
"""Pairs (or answers) of a step, and the seed of its numbers."""

KNOBS: dict[str, dict[str, Any]] = {
    "robust": {"label_smoothing": 0.2},
    "sigmoid": {"beta": 0.4, "f_divergence_type": "js_divergence"},
    "aot": {"label_smoothing": 0.1},
    "cpo": {"cpo_alpha": 0.7},
    "simpo": {"beta": 2.0, "cpo_alpha": 0.3},
    "kto": {"beta": 0.5, "undesirable_weight": 0.6},
    "bco": {"beta": 0.5},
}


def objectives(kind: str) -> list[PreferenceObjective]:
    """Every loss of a kind, and for pairs a mixture and a lighter tail."""
    names = ours(preference_losses)
    alone = [PreferenceObjective(losses=(n,), hparams=KNOBS.get(n, {})) for n in names]
    if kind == "pair":
        mixed = ("sigmoid", "aot", "sft")
        alone.append(PreferenceObjective(losses=mixed, loss_weights=(0.5, 1.0, 0.2)))
        alone.append(PreferenceObjective(losses=("sigmoid",), ld_alpha=0.3))
        alone.append(PreferenceObjective(losses=("aot_unpaired",), ld_alpha=0.3))
    return [o for o in alone if o.kind == kind]


def title(objective: PreferenceObjective) -> str:
    return "+".join(objective.losses) + ("-ld" if objective.ld_alpha is not None else "")


for_pairs = pytest.mark.parametrize("objective", objectives("pair"), ids=title)
for_answers = pytest.mark.parametrize("objective", objectives("unpaired"), ids=title)


class Tokens:
    """Packed tokens of a step in float64: log-probabilities that train, and those that do not."""

    def __init__(self, sequences: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (sequences,), generator=draw)
        total = int(lengths.sum())
        offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        mask = torch.rand(total, generator=draw) > 0.25
        mask[offsets[:-1]] = True
        self.layout = Layout(mask=mask, offsets=offsets, groups=torch.arange(sequences))
        normal = torch.randn(2, total, generator=draw, dtype=torch.float64)
        self.logp = (-normal[0].abs() - 0.05).requires_grad_()
        self.ref = self.logp.detach() + 0.7 * normal[1]
        self.good = torch.rand(sequences, generator=draw) > 0.4
        self.shift = torch.randn(3, generator=draw, dtype=torch.float64)


def shared_lengths(layout: Layout) -> Tensor:
    """Sequences 2i and 2i + 1 are a pair."""
    lengths = layout.lengths()
    return torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)


def pairs_of(objective: PreferenceObjective, tokens: Tokens) -> PairInputs:
    weights = objective.token_weights(tokens.layout, shared_lengths(tokens.layout))
    sums = sequence_sums(tokens.logp, tokens.layout, weights)
    ref = sequence_sums(tokens.ref, tokens.layout, weights)
    lengths = tokens.layout.lengths()
    return PairInputs(
        chosen=sums[0::2],
        rejected=sums[1::2],
        ref_chosen=ref[0::2],
        ref_rejected=ref[1::2],
        chosen_tokens=lengths[0::2],
        rejected_tokens=lengths[1::2],
    )


def answers_of(objective: PreferenceObjective, tokens: Tokens) -> UnpairedInputs:
    kto = objective.losses == ("kto",)
    return UnpairedInputs(
        logp=sequence_sums(tokens.logp, tokens.layout),
        ref_logp=sequence_sums(tokens.ref, tokens.layout),
        desirable=tokens.good,
        mismatched=tokens.shift if kto else None,
        ref_mismatched=tokens.shift.flip(0) - 0.5 if kto else None,
    )


def gradient_of(loss: Tensor, tokens: Tokens) -> Tensor:
    return torch.autograd.grad(loss, tokens.logp, retain_graph=True)[0]


def by_coefficients(
    per_sequence: Tensor, weights: Tensor | None, tokens: Tokens, part_of: list[int]
) -> Tensor:
    """The gradient of Σ coefficient·sum, made in parts that each hold some of the sequences."""
    total = torch.zeros_like(tokens.logp)
    for part in set(part_of):
        inside = torch.tensor([p == part for p in part_of])
        sums = sequence_sums(tokens.logp, tokens.layout, weights)[inside]
        total += gradient_of((per_sequence[inside] * sums).sum(), tokens)
    return total


def test_the_laws_cover_every_registered_loss():
    covered = {n for kind in ("pair", "unpaired") for o in objectives(kind) for n in o.losses}
    assert covered == set(ours(preference_losses))


@for_pairs
@few
@given(step=STEP, data=st.data())
def test_coefficients_give_the_gradient_of_the_step_in_any_cut(objective, step, data):
    number, seed = step
    tokens = Tokens(2 * number, seed)
    inputs = pairs_of(objective, tokens)
    whole = step_mean(objective(inputs).loss)
    found = objective.coefficients(inputs)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=2 * number, max_size=2 * number))
    interleaved = torch.stack([found.by["chosen"], found.by["rejected"]], 1).flatten()
    weights = objective.token_weights(tokens.layout, shared_lengths(tokens.layout))
    torch.testing.assert_close(found.loss, whole.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        by_coefficients(interleaved, weights, tokens, part_of),
        gradient_of(whole, tokens),
        rtol=1e-10,
        atol=1e-12,
    )


@for_answers
@few
@given(step=STEP, data=st.data())
def test_coefficients_of_answers_give_the_gradient_in_any_cut(objective, step, data):
    number, seed = step
    tokens = Tokens(number, seed)
    inputs = answers_of(objective, tokens)
    whole = step_mean(objective(inputs).loss)
    found = objective.coefficients(inputs)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    torch.testing.assert_close(found.loss, whole.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        by_coefficients(found.by["logp"], None, tokens, part_of),
        gradient_of(whole, tokens),
        rtol=1e-10,
        atol=1e-12,
    )


SEPARABLE = [o for kind in ("pair", "unpaired") for o in objectives(kind) if not o.needs_step]


@pytest.mark.parametrize("objective", SEPARABLE, ids=title)
@few
@given(step=STEP, data=st.data())
def test_parts_of_a_separable_loss_add_up(objective, step, data):
    number, seed = step
    paired = objective.kind == "pair"
    tokens = Tokens(2 * number if paired else number, seed)
    inputs = (pairs_of if paired else answers_of)(objective, tokens)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    whole = objective(inputs)
    parts = [
        objective(inputs.take(torch.tensor([i for i, p in enumerate(part_of) if p == part])))
        for part in sorted(set(part_of))
    ]
    total = torch.stack([step_mean(part.loss, of=number) for part in parts]).sum()
    torch.testing.assert_close(total, step_mean(whole.loss), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient_of(total, tokens), gradient_of(whole.loss.sum(), tokens) / number
    )
    for name, average in whole.metrics.items():
        merged = parts[0].metrics[name]
        for part in parts[1:]:
            merged = merged.merge(part.metrics[name])
        assert merged.value() == pytest.approx(average.value(), nan_ok=True)


@for_pairs
@few
@given(step=STEP, data=st.data())
def test_the_order_of_pairs_does_not_matter(objective, step, data):
    number, seed = step
    tokens = Tokens(2 * number, seed)
    inputs = pairs_of(objective, tokens)
    order = torch.tensor(data.draw(st.permutations(range(number))))
    shuffled = PairInputs(
        chosen=inputs.chosen[order],
        rejected=inputs.rejected[order],
        ref_chosen=inputs.ref_chosen[order],
        ref_rejected=inputs.ref_rejected[order],
        chosen_tokens=inputs.chosen_tokens[order],
        rejected_tokens=inputs.rejected_tokens[order],
    )
    first, second = objective(inputs), objective(shuffled)
    torch.testing.assert_close(second.loss, first.loss[order], rtol=1e-12, atol=1e-12)
    whole, there = step_mean(first.loss), step_mean(second.loss)
    torch.testing.assert_close(gradient_of(there, tokens), gradient_of(whole, tokens))


@for_pairs
@few
@given(step=STEP, extra=st.integers(0, 3))
def test_padded_rows_give_the_packed_loss(objective, step, extra):
    number, seed = step
    tokens = Tokens(2 * number, seed)
    expected = step_mean(objective(pairs_of(objective, tokens)).loss)
    widths = tokens.layout.offsets.diff()
    width = int(widths.max()) + extra

    def rows(x: Tensor, fill: float, side: int) -> Tensor:
        out = x.new_full((2 * number, width), fill)
        for i in range(2 * number):
            start, end = tokens.layout.offsets[i : i + 2].tolist()
            out[i, : end - start] = x[start:end]
        return out[side::2]

    loss, metrics = padded.preference_loss(
        objective.losses,
        rows(tokens.logp.detach(), torch.nan, 0),
        rows(tokens.logp.detach(), torch.nan, 1),
        rows(tokens.layout.mask, 0, 0),
        rows(tokens.layout.mask, 0, 1),
        ref_chosen_logp=rows(tokens.ref, torch.nan, 0),
        ref_rejected_logp=rows(tokens.ref, torch.nan, 1),
        loss_weights=objective.loss_weights,
        ld_alpha=objective.ld_alpha,
        **objective.hparams,
    )
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    assert metrics["preference/loss"] == pytest.approx(expected.item())


@few
@given(step=STEP)
def test_swapping_the_answers_mirrors_the_logistic_loss(step):
    number, seed = step
    inputs = pairs_of(PreferenceObjective(losses=("sigmoid",)), Tokens(2 * number, seed))
    swapped = PairInputs(
        chosen=inputs.rejected,
        rejected=inputs.chosen,
        ref_chosen=inputs.ref_rejected,
        ref_rejected=inputs.ref_chosen,
        chosen_tokens=inputs.rejected_tokens,
        rejected_tokens=inputs.chosen_tokens,
    )
    plain = PreferenceObjective(losses=("sigmoid",))
    noisy = PreferenceObjective(losses=("sigmoid",), hparams={"label_smoothing": 0.25})
    torch.testing.assert_close(
        noisy(inputs).loss, 0.75 * plain(inputs).loss + 0.25 * plain(swapped).loss
    )
