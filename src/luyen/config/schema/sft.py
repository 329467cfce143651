"""`sft`: learning from the conversations that are given."""

from typing import Literal

from luyen.config.schema.block import Block, key


class Sft(Block):
    """Which tokens of a conversation are learned, and how."""

    loss: str = key(
        "nll",
        "nll: negative log-likelihood; dft: each token's is weighted by its own probability, "
        "without a gradient through the weight (arXiv:2508.05629).",
    )
    learn: Literal["assistant", "last_turn", "completion"] = key(
        "assistant",
        "Which tokens count. assistant: all that the assistant says; last_turn: its last turn; "
        "completion: what follows the last message of somebody else, which in rows of prompt and "
        "completion is the completion.",
    )
