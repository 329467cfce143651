"""Near names and registries."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.errors import UserError, did_you_mean, edit_distance, near_names
from luyen.base.registry import Registry

WORDS = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("ab", "ba", 1), ("abc", "ac", 1), ("abc", "axc", 1), ("kitten", "sitting", 3)],
)
def test_edit_distance_counts_insertions_deletions_substitutions_and_swaps(
    a: str, b: str, distance: int
) -> None:
    assert edit_distance(a, b, limit=9) == distance


@given(WORDS, WORDS)
@settings(max_examples=100, deadline=None)
def test_edit_distance_is_symmetric_and_zero_only_for_equals(a: str, b: str) -> None:
    assert edit_distance(a, b, limit=9) == edit_distance(b, a, limit=9)
    assert (edit_distance(a, b, limit=9) == 0) == (a == b)


def test_beyond_the_limit_is_one_more_than_it() -> None:
    assert edit_distance("abcdef", "uvwxyz", limit=2) == 3


def test_nothing_near_lists_what_is_known() -> None:
    assert near_names("zzz", ["gamma"]) == []
    assert did_you_mean("zzz", ["lam", "gamma"]) == "known: gamma, lam"


def test_a_registry_refuses_a_name_twice_and_suggests_near_ones() -> None:
    registry: Registry = Registry("thing", "demo.thing")
    registry.register("round", colour="red")(print)
    with pytest.raises(UserError, match="registered already"):
        registry.register("round")(print)
    with pytest.raises(UserError, match="did you mean `round`"):
        registry.get("ruond")
    assert registry.facts("round") == {"colour": "red"}
    assert list(registry) == ["round"]


def test_a_users_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(UserError("a.b", 3, "too many", "take two")))
    assert (error.field, error.value, error.why, error.fix) == ("a.b", 3, "too many", "take two")
    assert str(error) == "a.b = 3: too many. Fix: take two"
