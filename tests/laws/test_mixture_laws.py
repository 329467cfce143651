"""A mixture keeps its shares over any stretch, visits each row once a pass, and needs no state."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.data.samplers.orders import Mixture

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
WEIGHT = st.one_of(st.integers(1, 9), st.floats(0.01, 50, allow_nan=False))


def files_of(sizes: list[int]) -> list[int]:
    return [file for file, size in enumerate(sizes) for _ in range(size)]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[float], int]:
    sizes = draw(SIZES)
    weights = draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)))
    return files_of(sizes), weights, draw(st.integers(0, 9))


@settings(max_examples=100, deadline=None)
@given(mixtures(), st.integers(0, 100_000), st.lists(st.integers(0, 40), max_size=5))
def test_a_resumed_mixture_goes_on_as_if_it_had_not_stopped(
    drawn: tuple[list[int], list[float], int], cursor: int, batches: list[int]
):
    files, weights, seed = drawn
    whole = Mixture(files, weights=weights, seed=seed).take(cursor, sum(batches))
    pieces: list[int] = []
    for size in batches:
        pieces += Mixture(files, weights=weights, seed=seed).take(cursor + len(pieces), size)
    assert pieces == whole


@settings(max_examples=100, deadline=None)
@given(mixtures(), st.integers(0, 5000), st.integers(1, 700))
def test_any_stretch_has_the_shares_of_the_weights(
    drawn: tuple[list[int], list[float], int], cursor: int, count: int
):
    files, weights, seed = drawn
    taken = Counter(
        files[row] for row in Mixture(files, weights=weights, seed=seed).take(cursor, count)
    )
    for file, weight in enumerate(weights):
        # Each end of the stretch is off by less than the number of files.
        assert abs(taken[file] - count * weight / sum(weights)) <= 2 * len(weights)


@settings(max_examples=60, deadline=None)
@given(mixtures())
def test_a_file_repeats_a_row_only_after_all_of_its_rows(drawn: tuple[list[int], list[float], int]):
    files, weights, seed = drawn
    order = Mixture(files, weights=weights, seed=seed).take(0, 400)
    for file in range(len(weights)):
        rows = [row for row in order if files[row] == file]
        size = files.count(file)
        for start in range(0, len(rows), size):
            one_pass = rows[start : start + size]
            assert len(set(one_pass)) == len(one_pass)


def test_the_beginning_is_the_same_whatever_is_taken_later():
    files, weights = files_of([5, 7]), (2.0, 1.0)
    assert Mixture(files, weights=weights, seed=3).take(0, 100)[:30] == Mixture(
        files, weights=weights, seed=3
    ).take(0, 30)


def test_another_seed_gives_another_order_with_the_same_shares():
    files, weights = files_of([50, 50]), (1.0, 3.0)
    one, other = (Mixture(files, weights=weights, seed=seed).take(0, 400) for seed in (0, 1))
    assert one != other
    assert Counter(files[row] for row in one) == {0: 100, 1: 300}


def test_a_file_of_weight_0_is_left_out():
    order = Mixture(files_of([5, 7]), weights=(0, 1), seed=0).take(0, 50)
    assert min(order) == 5
