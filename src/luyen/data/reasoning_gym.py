"""`reasoning_gym://TASK?...`: the tasks of the reasoning-gym package, with what its verifier needs.

A row's `data_source` is `reasoning_gym/TASK`, and its `extra_info` carries, under `reasoning_gym`,
the name of the dataset and the entry: what `reasoning_gym.get_score_answer_fn` asks for.
"""

import dataclasses
import importlib
import json
import random
from typing import Any

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.config.task_sources import read_gym
from luyen.config.task_url import FIELD, TaskUrl


def reasoning_gym_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of one task; every other key of the address goes to the task's own configuration."""
    gym, factory = _package(url)
    if url.name not in factory.DATASETS:
        raise url.error(f"no task `{url.name}`", did_you_mean(url.name, factory.DATASETS))
    known = [field.name for field in dataclasses.fields(factory.DATASETS[url.name][1])]
    url.refuse_unknown(known)
    size, seed = read_gym(url)
    own = {k: _literal(v) for k, v in url.query.items() if k not in ("size", "seed")}
    before = random.getstate()
    random.seed(seed)  # a few tasks draw from the global generator beside their own
    try:
        entries = list(gym.create_dataset(url.name, size=size, seed=seed, **own))
    except (AssertionError, ValueError, TypeError) as error:
        why = f"the task refuses its settings: {error}"
        raise url.error(why, f"mend {', '.join(own) or 'size'}") from error
    finally:
        random.setstate(before)
    return [_row(url.name, i, entry) for i, entry in enumerate(entries)]


def _package(url: TaskUrl) -> tuple[Any, Any]:
    try:
        return importlib.import_module("reasoning_gym"), importlib.import_module(
            "reasoning_gym.factory"
        )
    except ImportError as error:
        fix = 'install it: pip install "luyen[tasks]"'
        raise UserError(FIELD, url.text, "reasoning-gym is not installed", fix) from error


def _literal(text: str) -> Any:
    """A number, a boolean, a list, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of too many digits
        return text


def _row(task: str, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": str(entry["question"])}],
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": index, "reasoning_gym": {"dataset": task, "entry": entry}},
    }
