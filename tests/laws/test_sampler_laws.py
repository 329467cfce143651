"""Sampler laws: resuming anywhere changes nothing, and nothing is drawn out of turn."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Prompt, make_prompt
from luyen.data.samplers import AdaptiveSampler, Sampler, samplers

NAMES = ("shuffled", "sequential", "grouped", "mixed", "curriculum")
WEIGHTS = {"a": 1, "b": 2, "c": 4}


def rows(count: int) -> list[Prompt]:
    """Rows of three sources, with levels."""
    return [
        make_prompt(
            [{"role": "user", "content": str(i)}],
            data_source="abc"[i % 3],
            extra_info={"level": i * 5 % 11},
        )
        for i in range(count)
    ]


def make(name: str, count: int, seed: int, **more: Any) -> Sampler:
    """A fresh sampler, as a process that starts anew would make it."""
    kwargs: dict[str, Any] = {
        "mixed": {"weights": WEIGHTS},
        "curriculum": {"key": "level", "stages": 3},
    }.get(name, {})
    return samplers.get(name)(rows(count), seed=seed, **kwargs, **more)


def laws(max_examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=max_examples, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@laws(40)
@given(
    count=st.integers(3, 40),
    seed=st.integers(0, 5),
    cursor=st.integers(0, 3000),
    sizes=st.lists(st.integers(0, 30), max_size=6),
)
def test_resuming_anywhere_equals_never_having_stopped(
    name: str, count: int, seed: int, cursor: int, sizes: list[int]
):
    whole = make(name, count, seed).take(cursor, sum(sizes))
    pieces: list[int] = []
    for size in sizes:
        pieces += make(name, count, seed).take(cursor + len(pieces), size)
    assert pieces == whole
    used = make(name, count, seed)
    used.take(7 * count, count)
    assert used.take(cursor, sum(sizes)) == whole


@pytest.mark.parametrize("name", NAMES)
@laws(40)
@given(count=st.integers(3, 40), seed=st.integers(0, 5), cursor=st.integers(0, 500))
def test_every_draw_is_a_row(name: str, count: int, seed: int, cursor: int):
    drawn = make(name, count, seed).take(cursor, 50)
    assert len(drawn) == 50
    assert set(drawn) <= set(range(count))


@pytest.mark.parametrize("name", ["shuffled", "sequential", "grouped"])
@laws(40)
@given(count=st.integers(1, 60), seed=st.integers(0, 5), epoch=st.integers(0, 9))
def test_every_epoch_visits_every_row_once(name: str, count: int, seed: int, epoch: int):
    drawn = make(name, count, seed).take(epoch * count, count)
    assert sorted(drawn) == list(range(count))


@laws(25)
@given(
    count=st.integers(3, 40),
    weights=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    blocks=st.integers(1, 4),
)
def test_weights_are_respected_to_one_draw_in_a_thousand(
    count: int, weights: list[int], blocks: int
):
    by_source = dict(zip("abc", weights, strict=True))
    sampler = samplers.get("mixed")(rows(count), seed=0, weights=by_source)
    drawn = Counter("abc"[i % 3] for i in sampler.take(0, 1000 * blocks))
    for name, weight in by_source.items():
        assert abs(drawn[name] - 1000 * blocks * weight / sum(weights)) <= blocks
    a = [i for i in sampler.take(0, 1000 * blocks) if i % 3 == 0]
    counts = Counter(a)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(0, count, 3)) <= 1


@laws(25)
@given(count=st.integers(6, 40), seed=st.integers(0, 5))
def test_a_curriculum_never_draws_a_row_while_an_easier_one_waits_for_its_stage(
    count: int, seed: int
):
    prompts = rows(count)
    easiest = sorted(range(count), key=lambda i: (prompts[i].extra_info["level"], i))
    start = 0
    for stage in range(3):
        size = count * (stage + 1) // 3
        drawn = make("curriculum", count, seed).take(start, size)
        assert sorted(drawn) == sorted(easiest[:size])
        start += size


@laws(25)
@given(
    successes=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    stop=st.integers(0, 8),
    seed=st.integers(0, 3),
)
def test_a_curriculum_by_success_resumes_from_its_state(
    successes: list[float], stop: int, seed: int
):
    def run(restart_at: int | None) -> list[int]:
        sampler, drawn = make("curriculum", 20, seed, promote_at=0.5), list[int]()
        for step, success in enumerate(successes):
            assert isinstance(sampler, AdaptiveSampler)
            if step == restart_at:
                state = sampler.state
                sampler = make("curriculum", 20, seed, promote_at=0.5)
                assert isinstance(sampler, AdaptiveSampler)
                sampler.state = state
            drawn += sampler.take(len(drawn), 5)
            sampler.record(len(drawn), success)
        return drawn

    assert run(stop) == run(None)


@laws(15)
@given(count=st.integers(20, 60))
def test_seeds_give_different_orders(count: int):
    for name in ("shuffled", "grouped", "mixed", "curriculum"):
        orders = {tuple(make(name, count, seed).take(0, count)) for seed in range(4)}
        assert len(orders) == 4
