"""A reward model: the same packed forward, with one number wherever somebody is judged."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luyen.models.attention import AttentionContext
from luyen.models.backbone import hidden_at, prepare_layers
from luyen.models.export import make_readable
from luyen.models.offload import kept_on_host
from luyen.models.probe import refuse_what_cannot_be_packed
from luyen.models.silence import no_progress_bars
from luyen.models.steady_linear import choose_products

STEPWISE = "luyen_judges_steps"
"""Key of config.json: whether scores are of the steps of an answer."""


@final
class RewardModel(nn.Module):
    """A score for a sequence at its last token, or for a step at the token that ends it.

    The weights are those of transformers' `AutoModelForSequenceClassification` with one label.
    A score does not depend on what else is read at the same time, as far as the layers do not.
    """

    def __init__(self, net: PreTrainedModel) -> None:
        """`net` has a body and a linear layer `score` with one output and no bias."""
        super().__init__()
        self.net = net
        self.is_offloading = False
        """Whether activations wait for the backward pass in host memory."""
        if self.head.weight.dtype != torch.float64:
            # A score is one sum: rounding its weights would be most of its error.
            self.head.float()
        self.fused = prepare_layers(net, self.device)
        self.is_exact = True
        refuse_what_cannot_be_packed(net, None)

    @property
    def is_exact(self) -> bool:
        """On a GPU: whether a score has the same bits in a batch of any size."""
        return self._is_exact

    @is_exact.setter
    def is_exact(self, value: bool) -> None:
        self._is_exact = value
        if self.device.type == "cuda":
            choose_products(self.net, is_exact=value)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def head(self) -> nn.Linear:
        """What makes a score of a hidden state."""
        found = self.net.get_submodule("score")
        assert isinstance(found, nn.Linear)
        return found

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden state `[tok, hidden]` of packed tokens."""
        base: Any = self.net.base_model
        with kept_on_host(self.net) if self.is_offloading else nullcontext():
            out = base(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                luyen_context=context,
            )
        return out.last_hidden_state[0]

    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        judged: Tensor | None = None,
    ) -> Tensor:
        """Scores at the tokens where `judged` is True, in order; None: where `mask` is.

        A score sees its own token and those before it. `mask` says where answers are: what several
        sequences begin with before that is computed once.
        """
        where = (mask if judged is None else judged).nonzero()[:, 0]
        hidden = hidden_at(self.hidden, tokens, lengths, mask, where, is_exact=self.is_exact)
        weight = self.head.weight[0]
        # In float64 the order of the sum, which depends on the number of rows, does not show.
        return (hidden.double() * weight.double()).sum(-1).to(weight.dtype)

    def save(self, directory: Path, *, pad_token: int | None, is_stepwise: bool = False) -> None:
        """Write weights and config as transformers reads them.

        transformers takes the last token that is not `pad_token` for the end of a sequence, so it
        must be one that never ends one. Without one it reads one sequence at a time. `is_stepwise`
        notes in the config that scores are of steps, which transformers does not ask.
        """
        config: Any = self.net.config
        config.get_text_config().pad_token_id = pad_token
        setattr(config, STEPWISE, is_stepwise)
        with no_progress_bars():
            self.net.save_pretrained(directory)
        make_readable(directory)
