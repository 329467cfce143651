"""An engine of a plugin is believed only as far as its answers fit what was asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.rollout import engines as _engines  # registers those of the package
from luyen.rollout.engines import CheckedEngine, make_checked_engine
from luyen.rollout.protocol import (
    CacheStats,
    Completion,
    Request,
    Sampling,
    completion_fault,
    rollout_engines,
)
from luyen.runtime.weights import drop_prefixes
from tests.generation import Ladder

ASKED = Request(id="a", tokens=(1, 2), keys=(7,), sampling=Sampling(max_new_tokens=3))
GOOD = Completion(request="a", sample=0, tokens=(5, 6), logps=(-0.1, -0.2), reason="stop")
NAN = float("nan")


class Odd:
    """Answers what it was made with, once."""

    def __init__(self, answers: Any) -> None:
        self.answers: Any = answers
        self.is_idle, self.is_batch_invariant = False, True

    def submit(self, request: Request) -> None:
        """Nothing is kept."""

    def advance(self) -> Any:
        self.is_idle = True
        return self.answers() if callable(self.answers) else self.answers

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        return []

    def fingerprint(self) -> Any:
        return self.answers

    def close(self) -> None:
        raise SystemExit(0)


def watched(answers: Any) -> CheckedEngine:
    engine = CheckedEngine("odd", Odd(answers), vocabulary=10)
    engine.submit(ASKED)
    return engine


def test_an_answer_as_it_should_be_passes():
    engine = watched([GOOD])
    assert engine.advance() == [GOOD]
    assert engine.is_idle


WRONG: dict[str, dict[str, Any]] = {
    "logps has 1 entries": {"logps": (-0.1,)},
    "finite number of at most 0": {"logps": (NAN, NAN)},
    "finite number of at most": {"logps": (-0.1, float("-inf"))},
    "finite number of": {"logps": (5.0, 5.0)},
    "finite number": {"logps": (None, None)},
    "tokens are whole numbers from 0 to 9": {"tokens": (5, 10)},
    "tokens are whole numbers from 0": {"tokens": (-1, 5)},
    "tokens are whole numbers": {"tokens": (True, 1.5)},
    "at most 3 were wanted": {"tokens": (5,) * 4, "logps": (-0.1,) * 4},
    "are tuples": {"tokens": [5, 6]},
    "kept_mass is a probability": {"kept_mass": (NAN, 0.5)},
    "kept_mass has 1": {"kept_mass": (0.5,)},
    "versions are whole": {"versions": ("a", "b")},
    "it ended by 'bored'": {"reason": "bored"},
    "sample 9 of request 'a', which is not pending": {"sample": 9},
    "sample 0 of request 'b', which is not pending": {"request": "b"},
}


@pytest.mark.parametrize("why", WRONG)
def test_an_answer_that_is_none_is_refused(why: str):
    with pytest.raises(UserError, match=r"rollout.name = 'odd'") as refused:
        watched([replace(GOOD, **WRONG[why])]).advance()
    assert why in str(refused.value)


TOP = ((3, -0.5), (7, -2.0))
RICH = replace(GOOD, top_logps=(TOP, TOP))
WRONG_TOPS: dict[str, Any] = {
    "top_logps has 0 entries": (),
    "top_logps has 1 entries": (TOP,),
    "are tuples": [TOP, TOP],
    "2 pairs": (TOP, (*TOP, (8, -3.0))),
    "2 pairs of": (TOP, None),
    "2 pairs of id": (TOP, (3, -0.5)),
    "from 0 to 9": (TOP, ((10, -0.5), (7, -2.0))),
    "from 0 to": (TOP, ((True, -0.5), (7, -2.0))),
    "at most 0": (TOP, ((3, NAN), (7, -2.0))),
    "at most": (TOP, ((3, 0.5), (7, -2.0))),
    "sorted": (TOP, TOP[::-1]),
    "sorted by": (TOP, ((7, -0.5), (3, -0.5))),
    "sorted by log-probability": (TOP, (TOP[0], TOP[0])),
}


def test_alternatives_are_validated():
    asked = replace(ASKED, sampling=replace(ASKED.sampling, top_logprobs=2))
    assert completion_fault(RICH, asked, vocabulary=10) is None
    assert "top_logps has 2 entries" in str(completion_fault(RICH, ASKED, vocabulary=10))
    for why, tops in WRONG_TOPS.items():
        assert why in str(completion_fault(replace(GOOD, top_logps=tops), asked, vocabulary=10))


def test_an_answer_that_breaks_its_constraint_is_refused():
    asked = replace(ASKED, constraint=Ladder(14, stop=9), sampling=Sampling(max_new_tokens=9))
    good = replace(GOOD, tokens=(11, 13, 10, 12), logps=(-0.1,) * 4, kept_mass=(0.0,) * 4)
    assert completion_fault(good, asked, vocabulary=14) is None
    for tokens in ((11, 11, 12, 13), (11, 12, 13, 9)):
        wrong = replace(good, tokens=tokens)
        assert "the constraint does not allow" in str(completion_fault(wrong, asked, vocabulary=14))
    free = replace(asked, constraint=None)
    assert "probability above 0" in str(completion_fault(good, free, vocabulary=14))


@pytest.mark.parametrize("answers", [None, "x", [{"tokens": (5,)}], [GOOD, GOOD]])
def test_what_is_no_list_of_answers_is_refused(answers: Any):
    with pytest.raises(UserError, match=r"rollout.name = 'odd'"):
        watched(answers).advance()


def test_an_answer_that_never_came_is_missed():
    engine = watched([])
    engine.advance()
    with pytest.raises(UserError, match="sample 0 of a never came"):
        assert engine.is_idle
    engine.abort("a")
    assert engine.is_idle


def raising() -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "use", [lambda e: e.advance(), lambda e: e.close(), lambda e: e.fingerprint()]
)
def test_what_it_raises_is_an_error_with_its_name(use: Callable[[CheckedEngine], Any]):
    with pytest.raises(UserError, match=r"rollout.name = 'odd'"):
        use(watched(raising))


class CachingPlugin(Odd):
    """Keeps prefixes, and says so."""

    def __init__(self, stats: Any) -> None:
        super().__init__([])
        self.stats, self.drops = stats, 0

    def drop_prefixes(self) -> None:
        self.drops += 1

    def cache_stats(self) -> Any:
        return self.stats


def test_prefixes_of_a_plugin_are_dropped_before_its_weights_change():
    inner = CachingPlugin(CacheStats(tokens=7))
    engine = CheckedEngine("odd", inner, vocabulary=10)
    drop_prefixes(engine)
    assert (inner.drops, engine.cache_stats().tokens) == (1, 7)
    drop_prefixes(watched([GOOD]))
    assert watched([GOOD]).cache_stats() == CacheStats()
    with pytest.raises(UserError, match="cache_stats is a int"):
        CheckedEngine("odd", CachingPlugin(7), vocabulary=10).cache_stats()


def test_engines_of_the_package_are_not_watched():
    assert rollout_engines.get("native").__module__ == _engines.__name__
    made = Odd([])
    assert make_checked_engine("native", lambda: made, vocabulary=10) is made
