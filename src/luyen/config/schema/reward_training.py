"""`reward_training`: learning to judge."""

from typing import Literal

from luyen.config.schema.block import Block, key


class RewardTraining(Block):
    """What a reward model learns from."""

    objective: Literal["bradley_terry", "regression", "process"] = key(
        "bradley_terry",
        "bradley_terry: which of two answers is better; regression: the number that a row gives an "
        "answer; process: whether each step of an answer is right.",
    )
    center_rewards_coefficient: float = key(
        0.0,
        "bradley_terry: weight of the squared sum of both scores, which keeps scores around 0.",
        ge=0,
    )
    use_margins: bool = key(
        False, "bradley_terry: demand the column `margin` between the two scores."
    )
    target_key: str = key(
        "score",
        "regression: column with the number; rows that have a `label` instead count as 1 and 0.",
    )
