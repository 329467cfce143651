"""Laws of comparing two orders of the same rollouts."""

import math
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from luyen.studio.rescore_results import kendall_tau, rank_change

VALUES = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=9)
PAIRS = VALUES.flatmap(
    lambda one: st.tuples(
        st.just(one),
        st.lists(st.integers(-5, 5).map(float), min_size=len(one), max_size=len(one)),
    )
)


@given(PAIRS)
def test_tau_is_symmetric_bounded_and_turns_with_either_side(pair: tuple[list[float], list[float]]):
    one, other = pair
    tau = kendall_tau(one, other)
    assert tau == kendall_tau(other, one)
    assert (tau is None) == (len(set(one)) == 1 or len(set(other)) == 1)
    if tau is not None:
        assert -1 - 1e-12 <= tau <= 1 + 1e-12
        turned = kendall_tau(one, [-value for value in other])
        assert turned is not None
        assert math.isclose(tau, -turned)


@given(VALUES, st.floats(0.5, 4.0), st.floats(-3.0, 3.0))
def test_a_rising_function_changes_no_order(values: list[float], scale: float, shift: float):
    change = rank_change(values, [scale * value + shift for value in values])
    assert change.tau in (None, 1.0)
    assert not change.has_other_best
    assert all(move == 0 for move in change.moves)


@given(PAIRS)
def test_places_are_only_exchanged(pair: tuple[list[float], list[float]]):
    assert math.isclose(sum(rank_change(*pair).moves), 0.0, abs_tol=1e-9)


def test_tau_without_ties_is_the_textbooks():
    for order in permutations(range(4)):
        pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
        swapped = sum(order[i] > order[j] for i, j in pairs)
        expected = 1 - 2 * swapped / len(pairs)
        found = kendall_tau([0.0, 1.0, 2.0, 3.0], [float(place) for place in order])
        assert found is not None
        assert math.isclose(found, expected, abs_tol=1e-12)
