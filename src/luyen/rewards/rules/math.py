"""Mathematical equivalence, decided by the math-verify package in a process of its own."""

from luyen.base.records import Prompt
from luyen.rewards.rules.rule import Answer, rule_rewards, truths_of


@rule_rewards.register(
    "math",
    isolated=True,
    wrong=0.0,
    deterministic=True,
    door="luyen.rewards.rules.math_door",
    package="math_verify",
    extra="math",
)
def math_equal(prompt: Prompt, answer: Answer, *, float_rounding: int = 6) -> float:
    """1 when the answer and the ground truth are the same mathematical object."""
    from luyen.rewards.rules.math_door import equivalent

    return float(
        any(
            equivalent(truth, answer.text, float_rounding=float_rounding)
            for truth in truths_of(prompt)
        )
    )
