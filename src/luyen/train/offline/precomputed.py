"""The reference's log-probabilities of every row, made once and kept beside the run.

A reference never changes, so its numbers need no model at every step. They are those that a live
reference would give, and belong to the rows, the weights and the weights of tokens: a table of
anything else is made anew.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luyen.base.digests import hash_value
from luyen.base.files import read_json
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.tensors import load_state, save_state
from luyen.config.written import stored
from luyen.data.offline import OfflineData
from luyen.engine.lesson import Lesson
from luyen.engine.preference import Sums
from luyen.models.digest import describe
from luyen.train.offline.stage import Given

_FOLDER, _NAME = "reference", "sums"


def precomputed(
    live: Callable[[Lesson], Sums],
    lessons: Callable[[int], Iterable[Lesson]],
    given: Given,
    directory: RunDirectory,
    *,
    weights: Mapping[str, Tensor],
) -> Callable[[Lesson], Sums]:
    """What a live reference gives for each lesson, looked up instead of computed.

    `weights` are those of the reference. The table is kept in the run's directory.
    """
    key, folder = _key(given, weights), directory.root / _FOLDER
    table = _known(folder, key) or _made(live, lessons, given, folder, key)
    device = given.device

    def looked_up(lesson: Lesson) -> Sums:
        rows = [table[str(place)] for place in lesson.rows]
        return {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}

    return looked_up


def _made(
    live: Callable[[Lesson], Sums],
    lessons: Callable[[int], Iterable[Lesson]],
    given: Given,
    folder: Path,
    key: str,
) -> dict[str, Sums]:
    size, total = given.config.data.train_batch_size, _count(given.data)
    table: dict[str, Sums] = {}
    for lesson in lessons(size):
        given.display.waiting(f"reference: log-probabilities of {len(table)} of {total} rows")
        by_row = {name: lesson.by_row(x.cpu()) for name, x in live(lesson).items()}
        for i, place in enumerate(lesson.rows):
            table[str(place)] = {name: parts[i].clone() for name, parts in by_row.items()}
    folder.mkdir(exist_ok=True)
    places = list(table)
    joined = {name: torch.cat([table[p][name] for p in places]) for name in table[places[0]]}
    sizes = [len(next(iter(table[p].values()))) for p in places]
    kept = {"places": [int(p) for p in places], "sizes": sizes}
    save_state(folder, _NAME, {"key": key, **kept, "sums": joined})
    return table


def _known(folder: Path, key: str) -> dict[str, Sums] | None:
    """The table that the run kept, if it is of these rows and weights."""
    if not (folder / f"{_NAME}.json").is_file():
        return None
    if read_json(folder / f"{_NAME}.json")["state"].get("key") != key:
        return None
    kept = load_state(folder, _NAME)
    parts = {name: x.split(kept["sizes"]) for name, x in kept["sums"].items()}
    return {
        str(place): {name: split[i] for name, split in parts.items()}
        for i, place in enumerate(kept["places"])
    }


def _key(given: Given, weights: Mapping[str, Tensor]) -> str:
    """Hash of what the numbers depend on."""
    config, rows = given.config, given.data.given
    held = rows.validation.fingerprint if rows.validation is not None else None
    arr, data = config.actor_rollout_ref, config.data
    return hash_value(
        [
            [rows.train.fingerprint, held, len(given.data.train), len(given.data.validation)],
            stored(config)["actor_rollout_ref"]["model"],
            arr.ref.path,
            [config.preference.ld_alpha, list(config.preference.loss_type)],
            [data.max_prompt_length, data.max_response_length, data.apply_chat_template_kwargs],
            [describe(weights), given.tokenizer.fingerprint()],
        ]
    )


def _count(data: OfflineData[Any]) -> int:
    return len(data.train) + len(data.validation)
