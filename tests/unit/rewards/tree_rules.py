"""Rules for the tests of the reward tree, loaded as a plugin."""

from typing import Any

from luyen.base.records import Prompt, Score
from luyen.rewards.rules.rule import Answer, Unscorable, rule_rewards

SEEN: list[tuple[int, str]] = []


@rule_rewards.register("test_number", hparams=("column", "lost"))
def number(prompt: Prompt, answer: Answer, *, column: int = 0, lost: str = "") -> float:
    """A number of the answer."""
    SEEN.append((column, answer.text))
    if lost and lost in answer.text:
        raise Unscorable("lost")
    return float(answer.text.split()[column])


@rule_rewards.register("test_turns", sees="rollout")
def turns(prompt: Prompt, rollout: Any) -> Score:
    """4, of which the first turn has 1 and the second 2."""
    return Score(name="turns", value=4.0, by_turn=((0, 1.0), (1, 2.0)))
