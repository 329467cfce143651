"""How a rule is declared, and what it looks at.

A rule is a function `(prompt, answer, *, kwargs) -> float`. With `sees="rollout"` it is
`(prompt, rollout, *, kwargs)` instead, for the whole conversation. A rule returns a number, or
a `Score` with parts and with shares by turn. It raises `Unscorable` when it cannot score; a wrong
answer is no reason to raise. `isolated=True` runs it in another process under a time limit; `door`
is a module to import there beforehand; `package` and `extra` name what it needs. Scores of a rule
with `deterministic=True` may be taken from the cache. `wrong` is what an answer is worth on which
the rule runs out of time, memory or stack, or raises, with `wrong_per_call` for each of its calls;
without it such an answer is a fault.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from luyen.base.records import Prompt, Rollout, Score, StopReason
from luyen.base.registry import Registry

rule_rewards: Registry[Callable[..., float | Score]] = Registry("rule", "reward.components")


@final
class Unscorable(Exception):
    """Raised by a rule that cannot score: the row lacks what it compares with, for instance."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The side of a rollout that a rule sees: light enough to be sent to another process.

    Example:
        >>> Answer(text="4", response_length=2, stop=StopReason.ANSWERED).text
        '4'
    """

    text: str
    """The last assistant message."""
    response_length: int
    """Tokens after the prompt."""
    stop: StopReason
    """Why the rollout ended."""


def answer_of(rollout: Rollout) -> Answer:
    """What a rule sees of a rollout."""
    return Answer(text=rollout.text, response_length=rollout.response_length, stop=rollout.stop)


def truth_of(prompt: Prompt) -> Any:
    """What the answer is compared with; a row without it cannot be scored."""
    if prompt.ground_truth is None:
        raise Unscorable(f"the row has no ground truth (data source `{prompt.data_source}`)")
    return prompt.ground_truth


def truths_of(prompt: Prompt) -> list[str]:
    """The accepted answers as text: a list in the row means any of them."""
    truth = truth_of(prompt)
    many = truth if isinstance(truth, list | tuple) else [truth]
    if not many:
        raise Unscorable(f"the row's ground truth is empty (data source `{prompt.data_source}`)")
    return [str(one) for one in many]
