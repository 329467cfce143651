"""Verifiable instructions (Zhou et al. 2023, arXiv:2311.07911): checked, not judged.

A row names its instructions as the data set does: `instruction_id_list` and `kwargs`, beside each
other in its `extra_info` or in its ground truth, there also as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules import ifeval_form, ifeval_words
from luyen.rewards.rules.ifeval_instructions import check_of
from luyen.rewards.rules.rule import Answer, rule_rewards

CHECKED = (ifeval_form, ifeval_words)
"""Importing them declares the instructions."""
_IDS, _SETTINGS = "instruction_id_list", "kwargs"


@rule_rewards.register("ifeval", deterministic=True, wrong=0.0)
def ifeval(
    prompt: Prompt,
    answer: Answer,
    *,
    mode: Literal["strict", "loose"] = "strict",
    credit: Literal["all", "share"] = "all",
) -> float:
    """1 when the answer follows every instruction of the row, with `share` the part it follows.

    `loose` also accepts an answer that follows without its first line, its last line or its stars.
    """
    if mode not in ("strict", "loose"):
        raise Unscorable(f"mode {mode!r} is neither strict nor loose")
    if credit not in ("all", "share"):
        raise Unscorable(f"credit {credit!r} is neither all nor share")
    texts = variants(answer.text) if mode == "loose" else [answer.text]
    checks = [check_of(name, settings) for name, settings in instructions_of(prompt)]
    followed = [any(text.strip() and check(text) for text in texts) for check in checks]
    return sum(followed) / len(followed) if credit == "share" else float(all(followed))


def variants(text: str) -> list[str]:
    """An answer as it is, without its first line, its last, both; and each without its stars.

    Example:
        >>> variants("Sure:\\n*tea*")
        ['Sure:\\n*tea*', '*tea*', 'Sure:', '', 'Sure:\\ntea', 'tea', 'Sure:', '']
    """
    lines = text.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    plain = ["\n".join(some).strip() if some is not lines else text for some in cut]
    return [*plain, *(some.replace("*", "") for some in plain)]


def instructions_of(prompt: Prompt) -> list[tuple[str, Mapping[str, Any]]]:
    """The instructions of a row, each with its settings."""
    for place in (prompt.extra_info, _tree(prompt.ground_truth)):
        if not isinstance(place, Mapping) or _IDS not in place:
            continue
        row = cast(Mapping[str, Any], place)
        ids = _list(row[_IDS])
        settings = _list(row.get(_SETTINGS) or [{}] * len(ids))
        if not ids or len(ids) != len(settings):
            raise Unscorable(f"the row has {len(ids)} instructions and {len(settings)} {_SETTINGS}")
        return [(str(i), _mapping(s)) for i, s in zip(ids, settings, strict=True)]
    why = f"the row has no {_IDS} in its extra_info or ground truth"
    raise Unscorable(f"{why} (data source `{prompt.data_source}`)")


def _tree(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _list(value: Any) -> Sequence[Any]:
    found = _tree(value)
    if not isinstance(found, list | tuple):
        raise Unscorable(f"the row's instructions are no list: {str(value)[:100]!r}")
    return cast(Sequence[Any], found)


def _mapping(value: Any) -> Mapping[str, Any]:
    found = _tree(value) if value is not None else {}
    if not isinstance(found, Mapping):
        raise Unscorable(f"the row's settings of an instruction are {str(value)[:100]!r}")
    return cast(Mapping[str, Any], found)
