"""The adapter to reasoning-gym: entries generated from a seed, and their verifiers."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, final

import reasoning_gym
from reasoning_gym.utils import extract_answer

from luyen.base.errors import UserError, did_you_mean

_FIELD = "actor_rollout_ref.rollout.multi_turn.environments"
_SEEDS = 2**32
_global_numbers = Lock()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Riddle:
    """An entry with what judges it.

    Example:
        >>> riddle = made_riddle("leg_counting", {}, seed=3)
        >>> riddle.judge(str(riddle.entry["answer"]), riddle.entry)
        1.0
    """

    entry: Mapping[str, Any]
    """As the package makes it: `question`, `answer`, `metadata`."""
    judge: Callable[[str | None, Any], float]
    """The verifier of its dataset; None stands for no answer."""


def known_riddle(dataset: str, entry: Mapping[str, Any]) -> Riddle:
    """The riddle of an entry that a row carries."""
    return Riddle(entry=entry, judge=_verifier(dataset))


def made_riddle(dataset: str, config: Mapping[str, Any], *, seed: int) -> Riddle:
    """The riddle that a seed gives; a UserError when there is no such dataset or setting."""
    _require(dataset)
    with _global_numbers:  # a few datasets draw from the global generator beside their own
        before = random.getstate()
        random.seed(seed)
        try:
            made = reasoning_gym.create_dataset(dataset, size=1, seed=seed % _SEEDS, **config)
            return Riddle(entry=made[0], judge=made.score_answer)
        except (AssertionError, ValueError, TypeError) as error:
            why = f"{dataset} refuses its settings: {error}"
            raise UserError(f"{_FIELD}: config", dict(config), why, "mend config") from error
        finally:
            random.setstate(before)


def answer_in(text: str) -> str:
    """What stands inside the last `<answer>`, or the whole text where there is none."""
    found = extract_answer(text)
    return text.strip() if found is None else found


@cache
def _verifier(dataset: str) -> Callable[[str | None, Any], float]:
    _require(dataset)
    found: Any = reasoning_gym.get_score_answer_fn(dataset)  # declared there without arguments
    return found


def _require(dataset: str) -> None:
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        raise UserError(_FIELD, dataset, "reasoning-gym has none", did_you_mean(dataset, known))
