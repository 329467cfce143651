"""Laws of evaluation: shares equal enumeration, intervals cover, tests have their exact values."""

from itertools import combinations
from math import comb, isclose
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.studio.evaluation.compare import (
    compare,
    prompts_needed,
    sign_test,
    smallest_visible,
    spread_of,
)
from luyen.studio.evaluation.samples import Sample
from luyen.studio.evaluation.summary import mean_interval, summarise
from luyen.train.pass_at_k import majority_at_k, pass_at_k, powers_of_two, wilson_interval

SHARES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=30)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_solution(
    solved: list[bool], data: st.DataObject
):
    k = data.draw(st.integers(1, len(solved)))
    choices = list(combinations(solved, k))
    found = pass_at_k(sum(solved), len(solved), k)
    assert isclose(found, sum(map(any, choices)) / len(choices), abs_tol=1e-12)


def by_counting(votes: list[tuple[int, float]], k: int) -> float:
    """The majority's value over all choices of k votes, ties shared."""
    values: list[float] = []
    for chosen in combinations(votes, k):
        counts = {answer: sum(a == answer for a, _ in chosen) for answer, _ in chosen}
        winners = [a for a, n in counts.items() if n == max(counts.values())]
        values.append(fmean(fmean(v for a, v in chosen if a == winner) for winner in winners))
    return fmean(values)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8
    ),
    st.data(),
)
def test_majority_at_k_equals_counting_every_choice(
    votes: list[tuple[int, float]], data: st.DataObject
):
    k = data.draw(st.integers(1, len(votes)))
    assert isclose(majority_at_k(votes, k), by_counting(votes, k), abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=2, max_size=8))
def test_a_majority_of_one_or_two_is_the_mean(votes: list[tuple[int, float]]):
    mean = fmean(value for _, value in votes)
    assert isclose(majority_at_k(votes, 1), mean, abs_tol=1e-9)
    assert isclose(majority_at_k(votes, 2), mean, abs_tol=1e-9)


@given(SHARES, st.integers(0, 5))
def test_an_interval_is_repeatable_ordered_and_within_the_values(values: list[float], seed: int):
    found = mean_interval(values, seed=seed)
    assert found == mean_interval(values, seed=seed)
    assert min(values) <= found.low <= found.high <= max(values)
    assert found.holds(fmean(values))


@given(SHARES, st.floats(-3, 3), st.sampled_from([0.5, 2.0]))
def test_an_interval_moves_and_stretches_with_its_values(
    values: list[float], shift: float, scale: float
):
    plain, moved = mean_interval(values), mean_interval([scale * v + shift for v in values])
    assert isclose(moved.low, scale * plain.low + shift, abs_tol=1e-6)
    assert isclose(moved.high, scale * plain.high + shift, abs_tol=1e-6)


@pytest.mark.parametrize("skewed", [False, True])
def test_the_bootstrap_covers_the_truth_as_often_as_it_says(skewed: bool):
    random, held, rounds = Random(7), 0, 300
    for _ in range(rounds):
        if skewed:
            values, truth = [random.expovariate(1.0) for _ in range(40)], 1.0
        else:
            values, truth = [float(random.random() < 0.3) for _ in range(60)], 0.3
        held += mean_interval(values).holds(truth)
    assert 0.90 <= held / rounds <= 0.985


@given(st.integers(1, 200), st.floats(0.05, 0.95))
def test_more_prompts_make_narrower_intervals(count: int, share: float):
    def width(n: int) -> float:
        low, high = wilson_interval(share, n)
        return high - low

    assert width(4 * count) < width(count)


def test_mcnemar_has_its_exact_values():
    # By hand: 2 * P(X <= 1) with X ~ Binomial(10, 1/2) is 2 * (1 + 10) / 1024.
    assert sign_test(9, 1) == 22 / 1024
    assert sign_test(5, 0) == 2 / 32
    assert sign_test(6, 0) == 2 / 64
    assert sign_test(0, 0) == sign_test(4, 4) == sign_test(4, 5) == 1.0


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_sign_test_counts_every_way_that_is_at_least_as_lopsided(better: int, worse: int):
    changes = better + worse
    gap = abs(better - worse)
    ways = sum(comb(changes, i) for i in range(changes + 1) if abs(2 * i - changes) >= gap)
    assert sign_test(better, worse) == sign_test(worse, better)
    assert isclose(sign_test(better, worse), ways / 2**changes)


@given(st.floats(0.05, 1), st.floats(0.01, 0.5))
def test_the_number_needed_sees_what_it_was_asked_for(spread: float, difference: float):
    needed = prompts_needed(spread, difference)
    assert smallest_visible(spread, needed) <= difference * (1 + 1e-9)
    assert prompts_needed(spread, difference / 2) >= needed
    assert prompts_needed(2 * spread, difference) >= needed


def test_the_promised_power_is_there():
    random, spread, difference, told, rounds = Random(3), 0.5, 0.2, 0, 300
    count = prompts_needed(spread, difference)
    for _ in range(rounds):
        changes = [random.gauss(difference, spread) for _ in range(count)]
        told += not mean_interval(changes).holds(0.0)
    assert 0.72 <= told / rounds <= 0.9


def test_no_flip_at_all_still_leaves_room_for_one():
    assert spread_of([0.0] * 30) > spread_of([0.0] * 300) > 0


REWARD = st.one_of(st.none(), st.sampled_from([0.0, 1.0]))


def samples(rows: list[list[float | None]]) -> list[Sample]:
    return [
        Sample(
            uid=str(i),
            occurrence=0,
            data_source="a" if i % 2 else "b",
            question=f"{i}?",
            answer=str(reward),
            reward=reward,
            fault=None if reward is not None else "broke",
        )
        for i, row in enumerate(rows)
        for reward in row
    ]


ROWS = st.lists(st.lists(REWARD, min_size=3, max_size=3), min_size=1, max_size=8)


@given(ROWS)
def test_a_fault_is_counted_and_changes_no_number(rows: list[list[float | None]]):
    whole = summarise(samples(rows), [1, 2])
    sound = [[r for r in row if r is not None] for row in rows]
    for one in whole:
        mine = [s for i, s in enumerate(sound) if one.source in ("all", "a" if i % 2 else "b")]
        total = sum(map(len, mine))
        assert (one.samples, one.faults) == (total, 3 * len(mine) - total)
        judged = [fmean(row) for row in mine if row]
        values = {m.name: m.value for m in one.measures}
        assert (not judged) == (not values)
        if judged:
            assert isclose(values["accuracy"], fmean(judged))
            assert isclose(values["reward"], fmean(judged))


@given(ROWS, ROWS)
def test_a_comparison_the_other_way_round_is_its_mirror(
    first: list[list[float | None]], second: list[list[float | None]]
):
    one, two = samples(first), samples(second)
    shared = {s.uid for s in one if s.reward is not None} & {
        s.uid for s in two if s.reward is not None
    }
    if not shared:
        return
    there, back = compare(one, two), compare(two, one)
    assert sum(d.prompts for d in there.differences if d.source != "all") == len(shared)
    assert {f.uid for f in there.gained} == {f.uid for f in back.lost}
    assert there.unpaired == back.unpaired[::-1]
    by_source = {d.source: d for d in back.differences}
    for difference in there.differences:
        mirror = by_source[difference.source]
        assert isclose(difference.accuracy, -mirror.accuracy, abs_tol=1e-12)
        assert (difference.better, difference.worse) == (mirror.worse, mirror.better)
        assert difference.p == mirror.p
        assert difference.needed == mirror.needed


def test_powers_of_two_end_where_the_samples_end():
    assert list(powers_of_two(7)) == [1, 2, 4]
    assert list(powers_of_two(8)) == [1, 2, 4, 8]
