"""Samplers: hand-worked orders, and arguments that make no sense."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt, make_prompt
from luyen.config.plugins import SAMPLER_NEEDS, SAMPLERS
from luyen.data.samplers import AdaptiveSampler, Sampler, samplers
from luyen.data.samplers.orders import Curriculum, Grouped, Mixed, Sequential, Shuffled


def rows(*sources: str) -> list[Prompt]:
    return [
        make_prompt(
            [{"role": "user", "content": str(i)}],
            data_source=source,
            extra_info={"level": (i * 7) % 10, "word": "x"},
        )
        for i, source in enumerate(sources)
    ]


def test_check_knows_every_sampler_and_what_it_needs():
    built_in = [n for n in samplers if samplers.get(n).__module__.startswith("luyen.")]
    assert sorted(SAMPLERS) == built_in
    assert set(SAMPLER_NEEDS) <= set(SAMPLERS)


def test_sequential_goes_round():
    assert Sequential(rows("a", "a", "a"), seed=5).take(2, 5) == [2, 0, 1, 2, 0]


def test_epochs_are_shuffled_differently_and_by_seed():
    prompts = rows(*"a" * 50)
    first, second = Shuffled(prompts, seed=0).take(0, 50), Shuffled(prompts, seed=0).take(50, 50)
    assert first != second
    assert first != Shuffled(prompts, seed=1).take(0, 50)
    assert first != list(range(50))


def test_grouped_keeps_a_source_together_and_changes_their_order():
    prompts = rows(*"abcabcabc")
    order = Grouped(prompts, seed=0).take(0, 9 * 20)
    seen: list[tuple[str, ...]] = []
    for start in range(0, len(order), 9):
        epoch = [prompts[i].data_source for i in order[start : start + 9]]
        assert all(len(set(epoch[k : k + 3])) == 1 for k in (0, 3, 6))
        assert sorted(order[start : start + 9]) == list(range(9))
        seen.append((epoch[0], epoch[3], epoch[6]))
    assert len(set(seen)) > 1


def test_weights_are_met_exactly_in_every_thousand_draws():
    prompts = rows(*"a" * 3, *"b" * 90, "c")
    sampler = Mixed(prompts, seed=0, weights={"a": 0.5, "b": 0.3, "c": 0.2})
    for start in (0, 1000, 5000):
        drawn = [prompts[i].data_source for i in sampler.take(start, 1000)]
        assert Counter(drawn) == {"a": 500, "b": 300, "c": 200}
    assert len({"".join(drawn[k : k + 2]) for k in range(50)}) > 3


def test_a_source_is_gone_through_before_a_row_of_it_comes_again():
    prompts = rows(*"a" * 7, *"b" * 5)
    drawn = Mixed(prompts, seed=3, weights={"a": 2, "b": 1}).take(0, 2500)
    only_a = [i for i in drawn if i < 7]
    for start in range(0, len(only_a) - 7, 7):
        assert sorted(only_a[start : start + 7]) == list(range(7))


def test_weight_zero_leaves_a_source_out():
    drawn = Mixed(rows("a", "b"), seed=0, weights={"a": 1, "b": 0}).take(0, 100)
    assert set(drawn) == {0}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1}, "rows of `b` have no weight"),
        ({"a": 1, "b": 1, "bb": 1}, "did you mean `b`"),
        ({"a": 1, "b": -1}, "is negative"),
        ({"a": 1, "b": float("nan")}, "is negative"),
        ({"a": 0, "b": 0}, "all weights are 0"),
        ({"a": 1, "b": 1e-6}, "less than one row in 1000"),
    ],
)
def test_weights_that_cannot_be_met_are_refused(weights: dict[str, float], said: str):
    with pytest.raises(UserError) as caught:
        Mixed(rows("a", "b"), seed=0, weights=weights)
    assert said in str(caught.value)
    assert caught.value.field == "data.sampler.kwargs.weights"


def levels(prompts: Sequence[Prompt], drawn: Sequence[int]) -> list[int]:
    return sorted(prompts[i].extra_info["level"] for i in drawn)


def test_a_curriculum_grows_from_the_easiest_rows_to_all():
    prompts = rows(*"a" * 10)  # levels 0 to 9, each once, out of order
    sampler = Curriculum(prompts, seed=0, key="level", stages=3)
    assert levels(prompts, sampler.take(0, 3)) == [0, 1, 2]
    assert levels(prompts, sampler.take(3, 6)) == [0, 1, 2, 3, 4, 5]
    assert levels(prompts, sampler.take(9, 10)) == list(range(10))
    assert levels(prompts, sampler.take(19, 10)) == list(range(10))
    assert sampler.take(9, 10) != sampler.take(19, 10)


def test_a_curriculum_by_success_waits_for_it_and_resumes_from_two_integers():
    prompts = rows(*"a" * 10)

    def fresh() -> Curriculum:
        return Curriculum(prompts, seed=0, key="level", stages=2, promote_at=0.8)

    sampler = fresh()
    assert isinstance(sampler, AdaptiveSampler)
    assert levels(prompts, sampler.take(0, 10)) == sorted([0, 1, 2, 3, 4] * 2)
    sampler.record(10, 0.79)
    assert sampler.state == (0, 0)
    sampler.record(10, 0.8)
    assert sampler.state == (1, 10)
    assert levels(prompts, sampler.take(10, 10)) == list(range(10))
    sampler.record(20, 1.0)
    assert sampler.state == (1, 10)
    resumed = fresh()
    resumed.state = sampler.state
    assert resumed.take(13, 20) == sampler.take(13, 20)


def test_a_curriculum_by_passes_does_not_look_at_success():
    sampler = Curriculum(rows(*"a" * 10), seed=0, key="level")
    before = sampler.take(0, 30)
    sampler.record(5, 1.0)
    assert sampler.take(0, 30) == before


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"key": "levl"}, "did you mean `level`"),
        ({"key": "word"}, "which is no number"),
        ({"key": "level", "stages": 0}, "from 1 to 3 stages"),
        ({"key": "level", "stages": 4}, "from 1 to 3 stages"),
        ({"key": "level", "stages": 2, "promote_at": 1.5}, "at most at 1"),
    ],
)
def test_a_curriculum_without_sense_is_refused(kwargs: dict[str, Any], said: str):
    with pytest.raises(UserError) as caught:
        Curriculum(rows("a", "a", "a"), seed=0, **{"stages": 2, **kwargs})
    assert said in str(caught.value)


def test_what_has_take_is_a_sampler_and_only_a_curriculum_adapts():
    plain = Sequential(rows("a"), seed=0)
    assert isinstance(plain, Sampler)
    assert not isinstance(plain, AdaptiveSampler)
