"""The table of rollouts: filters by column over the index, text search by scanning, previews.

Filters by number and by name use the index alone. A text search reads the column of answers of one
file after the other, for a fraction of a second a request; the cursor says where to go on.
"""

import time
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from luyen.studio.doctor.vocabulary import TokenText
from luyen.studio.screens.folder import Refusal
from luyen.studio.screens.rollout_index import (
    Array,
    RolloutIndex,
    first_line,
    refuse_bombs,
)

pc: Any = pyarrow.compute
"""Its functions are made when it is imported, so that no type checker knows them."""

_SORTS = {"reward": "reward", "length": "length", "advantage": "advantage"}
_SEARCH_S = 0.5
_PREVIEW, _PREVIEW_TOKENS = 200, 160
_MOST_TEXT = 200_000
_DEEPEST = 100_000
"""Rollouts that can be paged through in the order of a value."""
Row = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """What the table is limited to, and its order.

    Example:
        >>> RolloutFilter(reward_min=0.5).has_columns
        True
    """

    start: int | None = None
    """First step."""
    end: int | None = None
    """Last step."""
    reward_min: float | None = None
    """Least reward."""
    reward_max: float | None = None
    """Greatest reward."""
    stop: str | None = None
    """Stop reason."""
    fault: str | None = None
    """First line of the fault; `any`: those with one."""
    tool: str | None = None
    """A tool that was called."""
    group: str | None = None
    """The group."""
    text: str | None = None
    """Words in the answer, in any case."""
    sort: str = "step"
    """Order by `step`, `reward`, `length` or `advantage`."""
    is_ascending: bool = False
    """Whether the smallest comes first."""

    @property
    def has_columns(self) -> bool:
        """Whether it looks at columns other than the step."""
        given = (self.reward_min, self.reward_max, self.stop, self.fault, self.tool, self.group)
        return any(one is not None for one in given)


def table_page(
    index: RolloutIndex, wanted: RolloutFilter, *, split: str, limit: int, cursor: str | None,
    text: TokenText,
) -> dict[str, Any]:  # fmt: skip
    """One page of the table."""
    steps = [s for s in index.steps if _is_between(s, wanted)]
    steps = steps if wanted.is_ascending else steps[::-1]
    scanned, total = len(steps), None
    if wanted.text:
        found, after, scanned = _search(index, wanted, steps, limit, cursor)
    else:
        masks = [_mask(index, block, wanted) for block in index.blocks()]
        total = sum(int(mask.sum()) for mask in masks)
        page = _by_step if wanted.sort == "step" else _by_value
        found, after = page(index, wanted, masks, limit, cursor)
    return {
        "rows": previews(index, found, split=split, text=text),
        "cursor": after,
        "scanned_steps": scanned,
        "indexed_steps": index.indexed_steps,
        "known_steps": len(index.steps),
        "total_steps": len(steps),
        "total_rows": total,
        "damaged": {str(s): why.partition(": ")[2] for s, why in list(index.damaged.items())[:20]},
        "choices": {
            "stop": index.stops.names[1:],
            "fault": index.faults.names[1:],
            "tool": index.tools.names[1:],
            "data_source": [],
        },
    }


def _is_between(step: int, wanted: RolloutFilter) -> bool:
    return (wanted.start is None or step >= wanted.start) and (
        wanted.end is None or step <= wanted.end
    )


def _mask(index: RolloutIndex, part: dict[str, Array], wanted: RolloutFilter) -> Array:
    """Which rollouts of some columns fit."""
    fits = part["step"] >= (0 if wanted.start is None else max(wanted.start, 0))
    if wanted.end is not None:
        fits &= part["step"] <= wanted.end
    if wanted.reward_min is not None:
        fits &= part["reward"] >= _reward(wanted.reward_min)
    if wanted.reward_max is not None:
        fits &= part["reward"] <= _reward(wanted.reward_max)
    if wanted.stop is not None:
        fits &= part["stop"] == (index.stops.find(wanted.stop) or 255)
    if wanted.fault == "any":
        fits &= part["fault"] > 0
    elif wanted.fault is not None:
        fits &= part["fault"] == (index.faults.find(wanted.fault) or 255)
    if wanted.tool is not None:
        code = index.tools.find(wanted.tool)
        fits &= (part["tools"] >> np.uint32(code or 0)) & 1 == 1 if code else False
    if wanted.group is not None:
        fits &= part["draw"] == _prompt_number(wanted.group)
    return fits


def _reward(bound: float) -> np.float32:
    """A bound as the index stores rewards; one beyond its range is infinite."""
    with np.errstate(over="ignore"):
        return np.float32(bound)


def _prompt_number(group: str) -> int:
    try:
        return int(group.split(".")[1])
    except (LookupError, ValueError):
        raise Refusal(
            422, f"group {group!r} is not written as step.draw.prompt", field="group"
        ) from None


def _by_step(
    index: RolloutIndex,
    wanted: RolloutFilter,
    masks: list[Array],
    limit: int,
    cursor: str | None,
) -> tuple[list[tuple[int, int]], str | None]:
    """The next page in the order of steps; rows of a step are in the order of its file."""
    last = _place(cursor)
    sign = 1 if wanted.is_ascending else -1
    # Only steps that can be on the page are looked at, a few at a time.
    steps: set[int] = set()
    for block, mask in zip(index.blocks(), masks, strict=False):
        steps |= set(_distinct(block["step"][mask]))
    found: list[tuple[int, int]] = []
    for step in sorted(steps, reverse=not wanted.is_ascending):
        if last is not None and sign * step < sign * last[0]:
            continue
        part = index.part(step)
        rows = [] if part is None else np.flatnonzero(_mask(index, part, wanted)).tolist()
        if last is not None and step == last[0]:
            rows = [row for row in rows if row > last[1]]
        for row in rows:
            if len(found) == limit:
                return found, f"{found[-1][0]}:{found[-1][1]}"
            found.append((step, row))
    return found, None


def _distinct(steps: Array) -> list[int]:
    """The different values; those of a step stand together, so that few are compared."""
    if not len(steps):
        return []
    starts = np.flatnonzero(np.diff(steps)) + 1
    return steps[np.concatenate([[0], starts])].tolist()


def _by_value(
    index: RolloutIndex,
    wanted: RolloutFilter,
    masks: list[Array],
    limit: int,
    cursor: str | None,
) -> tuple[list[tuple[int, int]], str | None]:
    """The next page in the order of a column; rollouts without a value have no place in it."""
    skipped = _number(cursor)
    most = skipped + limit + 1
    sign = 1.0 if wanted.is_ascending else -1.0
    best: list[tuple[float, int, int]] = []
    for number, (block, mask) in enumerate(zip(index.blocks(), masks, strict=False)):
        places = np.flatnonzero(mask)
        keys = sign * block[_SORTS[wanted.sort]][places].astype(np.float64)
        # What is worse than all of a whole page so far is left out before anything is ordered.
        has = keys <= best[-1][0] if len(best) == most else ~np.isnan(keys)
        places, keys = places[has], keys[has]
        if len(keys) > most:
            chosen = _smallest(keys, block["step"][places].astype(np.int64) << 32 | places, most)
            places, keys = places[chosen], keys[chosen]
        found = (index.row_at(number, place) for place in places.tolist())
        best += [(key, *where) for key, where in zip(keys.tolist(), found, strict=True)]
        best = sorted(best)[:most]
    page = [(step, row) for _, step, row in best[skipped : skipped + limit]]
    has_more = len(best) > skipped + limit and skipped + limit <= _DEEPEST
    return page, str(skipped + limit) if has_more else None


def _smallest(keys: Array, order: Array, most: int) -> Array:
    """Places of the smallest keys; among equal ones, as rewards are, those that come first.

    Another choice among equals on the next page would show some rows twice and leave out some.
    """
    bound = np.partition(keys, most - 1)[most - 1]
    below = np.flatnonzero(keys < bound)
    equal = np.flatnonzero(keys == bound)
    more = most - len(below)
    if len(equal) > more:
        equal = equal[np.argpartition(order[equal], more - 1)[:more]]
    return np.concatenate([below, equal])


def _search(
    index: RolloutIndex, wanted: RolloutFilter, steps: list[int], limit: int, cursor: str | None
) -> tuple[list[tuple[int, int]], str | None, int]:
    end = time.monotonic() + _SEARCH_S
    last = _place(cursor)
    found: list[tuple[int, int]] = []
    for number, step in enumerate(steps):
        if last is not None and (step < last[0] if wanted.is_ascending else step > last[0]):
            continue
        rows = _matches(index, step, wanted)
        if last is not None and step == last[0]:
            rows = [row for row in rows if row > last[1]]
        for row in rows:
            if len(found) == limit:
                return found, f"{found[-1][0]}:{found[-1][1]}", number + 1
            found.append((step, row))
        if time.monotonic() > end and number + 1 < len(steps):
            return found, f"{step}:{2**31}", number + 1
    return found, None, len(steps)


def _matches(index: RolloutIndex, step: int, wanted: RolloutFilter) -> list[int]:
    try:
        columns = read_columns(index, step, ["text"], None)
    except (OSError, ValueError, LookupError, pa.ArrowException):
        return []
    hits = pc.match_substring(columns["text"], wanted.text or "", ignore_case=True)
    fits = pc.fill_null(hits, False).to_numpy(zero_copy_only=False)
    if wanted.has_columns:
        part = index.part(step)
        if part is None or len(part["step"]) != len(fits):
            return []
        fits = fits & _mask(index, part, wanted)
    return np.flatnonzero(fits).tolist()


def _number(cursor: str | None) -> int:
    try:
        found = int(cursor or 0)
    except ValueError:
        found = -1
    if not 0 <= found <= _DEEPEST:
        raise Refusal(422, "cursor: it is none of ours", field="cursor")
    return found


def _place(cursor: str | None) -> tuple[int, int] | None:
    if cursor is None or not cursor:
        return None
    step, _, row = cursor.partition(":")
    try:
        return int(step), int(row)
    except ValueError:
        raise Refusal(422, "cursor: it is none of ours", field="cursor") from None


def read_columns(
    index: RolloutIndex, step: int, names: list[str], rows: list[int] | None
) -> pa.Table:
    """Columns of a file; with `rows` only the row groups that hold these, and then these rows."""
    path = index.path(step)
    if path.is_symlink():
        raise OSError("it is a link")
    with pq.ParquetFile(path) as file:
        known = [name for name in names if name in file.schema_arrow.names]
        refuse_bombs(file, known)
        if rows is None:
            return file.read(columns=known)
        wanted, places = _row_groups(file, rows)
        return file.read_row_groups(wanted, columns=known).take(places)


def _row_groups(file: pq.ParquetFile, rows: list[int]) -> tuple[list[int], list[int]]:
    """Row groups that hold some rows, and the places of the rows in them."""
    starts = [0]
    for i in range(file.metadata.num_row_groups):
        starts.append(starts[-1] + file.metadata.row_group(i).num_rows)
    if rows and max(rows) >= starts[-1]:
        raise LookupError("the file has fewer rows")
    groups = sorted({int(np.searchsorted(starts, row, side="right")) - 1 for row in rows})
    begins: dict[int, int] = {}
    size = 0
    for group in groups:
        begins[group] = size
        size += starts[group + 1] - starts[group]
    places = [
        begins[group] + row - starts[group]
        for row in rows
        for group in (int(np.searchsorted(starts, row, side="right")) - 1,)
    ]
    return groups, places


def rows_of_group(index: RolloutIndex, step: int, group: str) -> list[int]:
    """Places of the rollouts of a group in the file of a step."""
    try:
        groups = read_columns(index, step, ["group"], None)["group"].to_pylist()
    except (OSError, ValueError, LookupError, pa.ArrowException):
        return []
    return [row for row, name in enumerate(groups) if name == group][:1024]


def previews(
    index: RolloutIndex,
    found: list[tuple[int, int]],
    *,
    split: str,
    text: TokenText,
    is_whole: bool = False,
) -> list[Row]:
    """Rows of the table with the beginnings of prompt and answer; `is_whole`: the whole answer."""
    by_step: dict[int, list[int]] = {}
    for step, row in found:
        by_step.setdefault(step, []).append(row)
    texts: dict[tuple[int, int], tuple[str, str, str, str | None]] = {}
    for step, rows in by_step.items():
        names = ["group", "text", "fault", "tokens", "sources"]
        try:
            table = read_columns(index, step, names, rows)
        except (OSError, ValueError, LookupError, pa.ArrowException):
            continue
        for row, entry in zip(rows, table.to_pylist(), strict=True):
            texts[step, row] = (
                entry["group"],
                prompt_text(entry["tokens"], entry["sources"], text),
                (entry["text"] or "")[: _MOST_TEXT if is_whole else _PREVIEW],
                entry["fault"],
            )
    return [_row(index, step, row, split, texts.get((step, row))) for step, row in found]


def prompt_text(tokens: list[int], sources: list[int], text: TokenText) -> str:
    """The end of the prompt as text, where the question is."""
    begins = next((i for i, source in enumerate(sources) if source == 1), len(tokens))
    shown = "".join(text(token) for token in tokens[max(0, begins - _PREVIEW_TOKENS) : begins])
    return shown[-_PREVIEW:]


def _row(
    index: RolloutIndex, step: int, row: int, split: str,
    said: tuple[str, str, str, str | None] | None,
) -> Row:  # fmt: skip
    part = index.part(step)
    known = (
        {}
        if part is None or row >= len(part["step"])
        else {n: v[row].item() for n, v in part.items()}
    )
    group, prompt, answer, fault = said or ("", "", "", None)
    tools = known.get("tools", 0)
    return {
        "split": split,
        "step": step,
        "index": row,
        "group": group,
        "reward": _finite(known.get("reward")),
        "advantage": _finite(known.get("advantage")),
        "tokens": known.get("length"),
        "turns": known.get("turns"),
        "stop": index.stops.names[known["stop"]] if known else None,
        "fault": first_line(fault) or None,
        "tools": [
            name for code, name in enumerate(index.tools.names) if code and tools >> code & 1
        ],
        "version": known["version"] if known.get("version", -1) >= 0 else None,
        "prompt": prompt,
        "answer": answer,
    }


def _finite(value: float | None) -> float | None:
    """A number of the index, which has seven digits, without the noise of the rest."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.7g}")
