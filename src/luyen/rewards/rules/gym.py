"""Tasks of reasoning-gym, judged by the verifier that comes with each."""

from collections.abc import Mapping
from typing import Any

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import Answer, rule_rewards


@rule_rewards.register(
    "reasoning_gym",
    isolated=True,
    wrong=0.0,
    door="luyen.rewards.rules.gym_door",
    package="reasoning_gym",
    extra="tasks",
)
def reasoning_gym(prompt: Prompt, answer: Answer, *, tag: str = "answer") -> float:
    """What the task's verifier says about the text inside the last `<tag>`, or about all of it."""
    from luyen.rewards.rules.gym_door import verifier

    dataset, entry = task_of(prompt)
    return float(verifier(dataset)(tagged(answer.text, tag), entry))


def task_of(prompt: Prompt) -> tuple[str, Mapping[str, Any]]:
    """Name of the task and the entry that the verifier compares with, as the row carries them."""
    task = prompt.extra_info.get("reasoning_gym")
    if not isinstance(task, Mapping) or not {"dataset", "entry"} <= task.keys():
        why = 'the row lacks extra_info["reasoning_gym"] = {"dataset": ..., "entry": {...}}'
        raise Unscorable(f"{why} (data source `{prompt.data_source}`)")
    return str(task["dataset"]), task["entry"]


def tagged(text: str, tag: str) -> str:
    """The text inside the last pair of tags, or the whole text where there is none.

    Example:
        >>> tagged("<answer>1</answer> no: <answer> 2 </answer>", "answer")
        '2'
    """
    begin, end = f"<{tag}>", f"</{tag}>"
    found, at = text, 0
    while (first := text.find(begin, at)) >= 0:
        first += len(begin)
        last = text.find(end, first)
        if last < 0:
            break
        found, at = text[first:last], last + len(end)
    return found.strip()
