"""A critic: the same packed forward with one fp32 number per token instead of a vocabulary."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from luyen.models.policy import Policy


@final
class ValueModel(nn.Module):
    """Value of the state before each token: what the critic expects when that token is chosen."""

    def __init__(self, policy: Policy) -> None:
        """The body of `policy` with a head that starts at 0, so that the first values are 0."""
        super().__init__()
        config: Any = policy.model.config.get_text_config()
        self.body = policy
        if not _is_tied(policy):
            self.body.head.linear.requires_grad_(False)
        self.value = nn.Linear(config.hidden_size, 1, dtype=torch.float32, device=policy.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, tokens: Tensor, lengths: Sequence[int], mask: Tensor) -> Tensor:
        """Values before the tokens where `mask` is True, in order."""
        where = mask.nonzero()[:, 0]
        hidden = self.body.packed_hidden(tokens, lengths, mask, where - 1)
        # A tensor of its own: FSDP hangs a hook on it, which a view could lose.
        return self.value(hidden.float())[:, 0].clone()


def _is_tied(policy: Policy) -> bool:
    """A tied output layer is the embedding, which the critic trains; another one it never uses."""
    embedding: Any = policy.model.get_input_embeddings()
    output: Any = policy.head.linear
    return output.weight is embedding.weight
