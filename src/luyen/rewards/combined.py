"""Several reward functions as one: a weighted sum, with the number of every function.

The functions have our signature (`data_source, solution_str, ground_truth, extra_info`) or TRL's
(`completions, **columns`), in any mixture. The sum has TRL's, so it scores one answer at a time or,
with `reward.reward_manager.name: batch`, all answers of a step in one call.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from luyen.rewards.user_functions import COMPLETIONS, is_trl

Weighted: TypeAlias = tuple[str, Callable[..., Any], float]
"""Name in metrics, function, and factor in the sum."""
_INFO = "extra_info"
_OF_TRL = ("answer", "solution", "prompts", "completion_ids")
"""Columns that a function of our signature is not given."""


def combined(functions: Sequence[Weighted], columns: Mapping[str, Any]) -> list[dict[str, float]]:
    """For every answer the weighted sum under `score`, and each function's number by its name.

    A function that returns None for an answer, as TRL's may, does not count for it. `columns` are
    lists with an entry per answer, `completions` and `extra_info` among them; none of the functions
    is called `score`.

    Example:
        >>> def brief(completions, **_):
        ...     return [float(len(text) < 3) for text in completions]
        >>> def right(data_source, solution_str, ground_truth, extra_info):
        ...     return float(solution_str == ground_truth)
        >>> columns = {"completions": ["4", "four"], "ground_truth": ["4", "4"]}
        >>> columns |= {"data_source": ["sums", "sums"], "extra_info": [{}, {}]}
        >>> combined([("brief", brief, 0.5), ("right", right, 1.0)], columns)
        [{'score': 1.5, 'brief': 1.0, 'right': 1.0}, {'score': 0.0, 'brief': 0.0, 'right': 0.0}]
    """
    count = len(columns[COMPLETIONS])
    found: dict[str, list[Any]] = {}
    for name, function, _ in functions:
        values = _values(function, columns, count)
        if len(values) != count:
            raise ValueError(f"`{name}` returned {len(values)} scores for {count} answers")
        found[name] = values
    weights = {name: weight for name, _, weight in functions}
    return [_together({n: v[i] for n, v in found.items()}, weights) for i in range(count)]


def _together(values: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, float]:
    known = {name: float(value) for name, value in values.items() if value is not None}
    if not known:
        raise ValueError("no function gave this answer a score: each returned None")
    return {"score": sum(weights[name] * value for name, value in known.items()), **known}


def _values(function: Callable[..., Any], columns: Mapping[str, Any], count: int) -> list[Any]:
    if is_trl(function):
        return list(function(**_taken(function, columns)))
    parameters = inspect.signature(function).parameters
    per_answer = {name for info in columns[_INFO] for name in info} | {COMPLETIONS, *_OF_TRL}
    # What is left are keyword arguments of the configuration, the same for every answer.
    more = {n: v for n, v in columns.items() if n in parameters and n not in per_answer}
    return [function(**{**more, **_row(columns, i)}) for i in range(count)]


def _taken(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """What a function of TRL's signature is given where it is the only one."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {
        name: value
        for name, value in columns.items()
        if name in parameters or (takes_all and name != _INFO)
    }


def _row(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Our arguments for one answer."""
    return {
        "data_source": columns["data_source"][index],
        "solution_str": str(columns[COMPLETIONS][index]),
        "ground_truth": columns["ground_truth"][index],
        _INFO: columns[_INFO][index],
    }
