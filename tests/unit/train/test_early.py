"""The next step is asked for early only where nothing comes between, and it is the same step."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from luyen.data.samplers import AdaptiveSampler
from luyen.runtime.pending import InTurn
from luyen.train.asked import Asked, Place
from luyen.train.early import ask_early, foresee
from luyen.train.work import weights_print


class Held:
    """What the roles hold."""

    def weights(self) -> dict[str, str]:
        return {"actor/w": "float32 [1] 07"}

    def moments(self) -> dict[str, str]:
        raise AssertionError("nobody waits for moments")


class Adaptive:
    """A sampler that looks at what was learned."""

    state = (0,)

    def take(self, cursor: int, count: int) -> list[int]:
        return list(range(cursor, cursor + count))

    def record(self, cursor: int, success: float) -> None:
        del cursor, success


def run_of(**changes: Any) -> Any:
    """A run of ten steps that has done three and has learned the fourth."""
    given = {
        "elsewhere": True,
        "staleness": 0,
        "interrupted": False,
        "due": 0,
        "step": 3,
        "sampler": None,
    } | changes
    asked: list[Any] = []
    return SimpleNamespace(
        step=given["step"],
        version=3,
        last_step=10,
        chain="c",
        asked=asked,
        config=SimpleNamespace(
            trainer=SimpleNamespace(max_staleness=given["staleness"], test_freq=5, save_freq=0)
        ),
        roles=SimpleNamespace(draws_elsewhere=given["elsewhere"]),
        interruption=SimpleNamespace(is_wanted=given["interrupted"]),
        data=SimpleNamespace(sampler=given["sampler"]),
        phase=nullcontext,
        is_due_after=lambda step, every: every > 0 and step == given["due"],
        supply=SimpleNamespace(ask_up_to=lambda *what, **how: asked.append((*what, how))),
        asking=SimpleNamespace(foresee=lambda *what, **how: asked.append((*what, how))),
    )


def test_the_next_step_is_asked_for_with_the_weights_that_were_learned():
    run = run_of()
    foresee(run)
    ask_early(run, Held())
    assert run.asked == [
        (5, {"version": 4}),
        (5, {"version": 4, "origin": ("c", weights_print(Held()))}),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"elsewhere": False},
        {"staleness": 1},
        {"interrupted": True},
        {"due": 4},
        {"step": 9},
        {"sampler": Adaptive()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_is_not_asked_for_where_something_comes_between(change: dict[str, Any]):
    run = run_of(**change)
    foresee(run)
    ask_early(run, Held())
    assert run.asked == []


def test_what_is_in_progress_is_kept_as_rows_that_are_drawn_anew():
    place = Place(step=5, first=0, rows=(1, 2), version=4, origin=("c", None))
    asked = Asked(place=place, drawn=InTurn(lambda: []), greedy=None, journal=None)
    assert asked.as_it_is() == {**place.as_json(), "drawn": None}
    assert not asked.needs_other_weights(4), "the weights of the checkpoint draw the same"
    assert asked.needs_other_weights(5)
    asked.drawn.result()
    assert asked.as_it_is() == asked.as_json()
    assert not asked.needs_other_weights(5)


def test_the_sampler_of_this_test_is_one_that_adapts():
    assert isinstance(Adaptive(), AdaptiveSampler)
