"""Laws of every advantage estimator, over ragged batches with gaps, dead rows and odd groups."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.advantages import Credit, adv_estimators
from luyen.config.catalog import ADV_ESTIMATORS
from tests.unit.algorithms.credit_batches import NAN, Row, batches, inputs_of, per_row, rows_of
from tests.unit.algorithms.plain_estimators import KNOBS, PLAIN, credited, live

NAMES = sorted(adv_estimators)
GROUPED = [name for name in NAMES if ADV_ESTIMATORS[name].group_relative]
few = settings(max_examples=10, deadline=None)
more = settings(max_examples=30, deadline=None)


def run(name: str, rows: list[Row], dtype: torch.dtype = torch.float64, **hparams: float) -> Credit:
    return adv_estimators.get(name)(inputs_of(rows, dtype), **(KNOBS.get(name, {}) | hparams))


def close(x: Tensor, y: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


def shifted(row: Row, amount: float) -> Row:
    """The row with `amount` more reward, in total and in each part."""
    rewards = (row.rewards[0] + amount, *row.rewards[1:])
    return replace(row, rewards=rewards, parts={k: v + amount for k, v in row.parts.items()})


def scaled(row: Row, by: float) -> Row:
    parts = {k: v * by for k, v in row.parts.items()}
    return replace(row, rewards=tuple(r * by for r in row.rewards), parts=parts)


def test_every_estimator_of_the_catalogue_is_registered_and_has_a_plain_twin():
    assert set(NAMES) == set(ADV_ESTIMATORS) == set(PLAIN)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@more
def test_it_equals_the_formula_in_plain_floats(name: str, rows: list[Row]):
    expected = torch.tensor([x for r in PLAIN[name](rows) for x in r], dtype=torch.float64)
    close(run(name, rows).advantages, expected)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "online_dpo"])
@given(rows=batches(), random=st.randoms(use_true_random=False))
@few
def test_the_order_of_sequences_does_not_matter(name: str, rows: list[Row], random):
    order = list(range(len(rows)))
    random.shuffle(order)
    mixed = [rows[i] for i in order]
    before = per_row(run(name, rows).advantages, rows)
    after = per_row(run(name, mixed).advantages, mixed)
    for place, i in enumerate(order):
        assert after[place] == pytest.approx(before[i], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@few
def test_the_labels_of_groups_do_not_matter(name: str, rows: list[Row]):
    named = [replace(r, group=(-7, 10**12, 3)[r.group]) for r in rows]
    close(run(name, rows).advantages, run(name, named).advantages)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@few
def test_credit_is_exactly_zero_on_masked_tokens(name: str, rows: list[Row]):
    credit = run(name, rows)
    masked = ~inputs_of(rows).layout.mask
    assert not credit.advantages[masked].any()
    assert not credit.returns[masked].any()


@pytest.mark.parametrize("name", GROUPED)
@given(rows=batches())
@few
def test_a_group_of_one_gets_exactly_zero(name: str, rows: list[Row]):
    alone = replace(rows[0], group=99)
    credit = per_row(run(name, [*rows, alone]).advantages, [*rows, alone])
    assert credit[-1] == [0.0] * len(alone.mask)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@few
def test_nan_on_masked_positions_changes_nothing(name: str, rows: list[Row]):
    def spoilt(row: Row, stream: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(x if m else NAN for x, m in zip(stream, row.mask, strict=False))

    clean = [
        replace(
            r,
            rewards=tuple(x if m else 0.0 for x, m in zip(r.rewards, r.mask, strict=True)),
            baseline=r.baseline if any(r.mask) else 0.0,
        )
        for r in rows
    ]
    dirty = [
        replace(
            r,
            rewards=spoilt(r, r.rewards),
            values=spoilt(r, r.values),
            old_logp=spoilt(r, r.old_logp),
            ref_logp=spoilt(r, r.ref_logp),
            sum_pi_squared=spoilt(r, r.sum_pi_squared),
            is_weights=spoilt(r, r.is_weights),
            turns=tuple(x if m else -1 for x, m in zip(r.turns, r.mask, strict=True)),
            baseline=r.baseline if any(r.mask) else NAN,
        )
        for r in clean
    ]
    a, b = run(name, clean), run(name, dirty)
    assert torch.equal(a.advantages, b.advantages)
    assert torch.equal(a.returns, b.returns)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches())
@few
def test_float32_is_close_to_float64(name: str, rows: list[Row]):
    single = run(name, rows, torch.float32).advantages
    assert single.dtype == torch.float32
    # GDPO's parts may cancel; whitening then magnifies what rounding left of them
    close(single, run(name, rows).advantages, 2e-2 if name == "gdpo" else 2e-3)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches(), dead=rows_of(77))
@few
def test_a_fully_masked_sequence_of_another_group_changes_nothing(
    name: str, rows: list[Row], dead: Row
):
    dead = replace(dead, mask=(False,) * len(dead.mask))
    if not rows[0].is_weights:
        dead = replace(dead, is_weights=())
    elif not dead.is_weights:
        dead = replace(dead, is_weights=(1.0,) * len(dead.mask))
    padded = [dead, *rows, replace(dead, group=78)]
    inside = run(name, padded).advantages[len(dead.mask) : -len(dead.mask)]
    close(inside, run(name, rows).advantages)


@pytest.mark.parametrize("name", NAMES)
@given(rows=batches(live=True))
@few
def test_a_reward_on_a_masked_token_is_not_lost(name: str, rows: list[Row]):
    moved: list[Row] = []
    for row in rows:
        rewards = [0.0] * len(row.mask)
        for t, reward in zip(live(row), credited(row), strict=True):
            rewards[t] = reward
        moved.append(replace(row, rewards=tuple(rewards)))
    close(run(name, rows).advantages, run(name, moved).advantages)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@given(rows=batches(live=True))
@few
def test_the_advantages_of_a_group_sum_to_zero(name: str, rows: list[Row]):
    credit = per_row(run(name, rows).advantages, rows)
    for group in {r.group for r in rows}:
        members = [max(c, key=abs) for c, r in zip(credit, rows, strict=True) if r.group == group]
        assert sum(members) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "name", [n for n in GROUPED if n not in ("gpg", "turn_grpo") and "token" not in n]
)
@given(rows=batches(), shift=st.integers(-40, 40))
@few
def test_a_shift_of_all_rewards_changes_nothing(name: str, rows: list[Row], shift: int):
    close(run(name, rows).advantages, run(name, [shifted(r, shift / 4) for r in rows]).advantages)


@pytest.mark.parametrize("name", ["rloo", "opo", "remax", "reinforce", "gpg"])
@given(rows=batches())
@few
def test_it_scales_with_the_rewards(name: str, rows: list[Row]):
    larger = [replace(scaled(r, 3.0), baseline=3.0 * r.baseline) for r in rows]
    close(3.0 * run(name, rows).advantages, run(name, larger).advantages)


@pytest.mark.parametrize(
    "name",
    ["grpo", "turn_grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
@given(rows=batches())
@few
def test_it_does_not_depend_on_the_scale_of_rewards(name: str, rows: list[Row]):
    close(run(name, rows).advantages, run(name, [scaled(r, 4.0) for r in rows]).advantages, 1e-4)


@pytest.mark.parametrize("name", ["grpo", "turn_grpo", "grpo_passk", "rloo", "opo"])
@given(rows=batches(), other=batches())
@few
def test_other_groups_do_not_matter(name: str, rows: list[Row], other: list[Row]):
    strangers = [replace(r, group=r.group + 10, is_weights=()) for r in other]
    mine = [replace(r, is_weights=()) for r in rows]
    together = run(name, [*mine, *strangers]).advantages
    alone = run(name, mine).advantages
    close(together[: alone.numel()], alone)
