"""The adapter to reasoning-gym: entries generated from a seed, and their verifiers.

The only file that imports the package; rewards and environments use it.
"""
# pyright: basic
# The package is not typed.

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
_global_rng_lock = Lock()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GymTask:
    """An entry with its verifier.

    Example:
        >>> task = make_task("leg_counting", {}, seed=3)
        >>> task.score_answer(str(task.entry["answer"]), task.entry)
        1.0
    """

    entry: Mapping[str, Any]
    """The package's entry: `question`, `answer`, `metadata`."""
    score_answer: Callable[[str | None, Any], float]
    """The verifier of its dataset; the answer None means that there is none."""


def task_from_entry(dataset: str, entry: Mapping[str, Any]) -> GymTask:
    """The task of an entry in a data row."""
    return GymTask(entry=entry, score_answer=verifier(dataset))


def make_task(dataset: str, config: Mapping[str, Any], *, seed: int) -> GymTask:
    """The task generated from a seed; a UserError for an unknown dataset or a bad config."""
    _require(dataset)
    with _global_rng_lock:  # a few datasets also use the global generator
        before = random.getstate()
        random.seed(seed)
        try:
            made = reasoning_gym.create_dataset(dataset, size=1, seed=seed % _SEEDS, **config)
            return GymTask(entry=made[0], score_answer=made.score_answer)
        except (AssertionError, ValueError, TypeError) as error:
            why = f"{dataset} refuses its settings: {error}"
            raise UserError(f"{_FIELD}: config", dict(config), why, "change config") from error
        finally:
            random.setstate(before)


def answer_in(text: str) -> str:
    """Text inside the last `<answer>`, or the whole text without one."""
    found = extract_answer(text)
    return text.strip() if found is None else found


@cache
def verifier(dataset: str) -> Callable[[str | None, Any], float]:
    """The scoring function of a dataset; a UserError for an unknown one."""
    _require(dataset)
    found: Any = reasoning_gym.get_score_answer_fn(dataset)  # declared there without arguments
    return found


def _require(dataset: str) -> None:
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        raise UserError(_FIELD, dataset, "reasoning-gym has none", did_you_mean(dataset, known))
