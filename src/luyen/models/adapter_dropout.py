"""Dropout of an adapter's inputs, with masks that depend on an address and not on when.

The numbers of a mask come from a key of the pass (run seed, step, micro-batch) and the place of the
layer. So a pass that is computed again in the backward pass has the masks of its forward pass, a
resumed run has those of one that never stopped, and PyTorch's global random numbers are not used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from luyen.base.seeds import mix


@final
class AdapterDropout(nn.Module):
    """Sets a share of the inputs to 0 in training, and scales the rest up.

    Example:
        >>> layer = AdapterDropout(0.5, place=0).train()
        >>> layer.key = 7
        >>> sorted(set(layer(torch.ones(64)).tolist()))
        [0.0, 2.0]
        >>> torch.equal(layer(torch.ones(64)), layer(torch.ones(64)))
        True
        >>> layer.eval()(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, share: float, *, place: int) -> None:
        """`place` distinguishes the layers of a model."""
        super().__init__()
        self.share = share
        self.place = place
        self.key: int | None = None
        """Of the pass; None: no training pass was begun."""

    def forward(self, x: Tensor) -> Tensor:
        """The inputs, masked in training."""
        if not self.training:
            return x
        assert self.key is not None, "a training pass has dropout, and nothing gave it a key"
        generator = torch.Generator(x.device).manual_seed(mix(self.key, self.place))
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.share
        # A factor of 1 / (1 - share) would be rounded to 16 bits, the same way for every input.
        return x.masked_fill(~kept, 0.0) / (1 - self.share)


def dropout_layers(module: nn.Module) -> list[AdapterDropout]:
    """Those of a model; none without `lora_dropout`."""
    return [layer for layer in module.modules() if isinstance(layer, AdapterDropout)]


@final
class PassMasks:
    """Masks of the micro-batches of one optimizer step, in order; none without a key.

    A pass that scores and a pass that learns have the same masks at the same place of two such
    sequences with the same key.

    Example:
        >>> layer, masks = AdapterDropout(0.5, place=0), []
        >>> for _ in range(2):
        ...     passes = PassMasks(layer, key=3)
        ...     with passes.in_scores():
        ...         passes.begin()
        ...         masks.append(layer(torch.ones(64)))
        >>> torch.equal(*masks), layer.training
        (True, False)
    """

    def __init__(self, module: nn.Module, key: int | None) -> None:
        self._key = key
        self._layers = [] if key is None else dropout_layers(module)
        self._index = 0
        self._give(0)  # to a rank whose passes are all dummies

    def begin(self) -> None:
        """Begin the next micro-batch."""
        self._give(self._index)
        self._index += 1

    @contextmanager
    def in_scores(self) -> Iterator[None]:
        """Inside, passes without gradients have masks as well; the rest of the model has not."""
        for layer in self._layers:
            layer.train()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.eval()

    def _give(self, index: int) -> None:
        for layer in self._layers:
            layer.key = mix(self._key or 0, index)
