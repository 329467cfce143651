"""Learning from answers that are given: a loss for each token."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses.inputs import TokenLoss
from luyen.base.registry import Registry

SupervisedLoss = Callable[[Tensor, Layout], TokenLoss]
"""`([tok] log-probabilities, layout) -> the loss of each trainable token`."""

supervised_losses: Registry[SupervisedLoss] = Registry("supervised loss", "sft.loss")


@supervised_losses.register("nll")
def negative_log_likelihood(logp: Float[Tensor, " tok"], layout: Layout) -> TokenLoss:
    """-log π of each trainable token; what stands on masked tokens does not matter.

    Example:
        >>> import torch
        >>> layout = Layout(mask=torch.tensor([False, True]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> negative_log_likelihood(torch.tensor([float("nan"), -0.5]), layout).per_token
        tensor([-0.0000, 0.5000])
    """
    per_token = -layout.on_mask(logp)
    metrics = {"sft/nll": Average.over(per_token, layout.mask)}
    return TokenLoss(per_token=per_token, metrics=metrics)


@supervised_losses.register("dft")
def dynamic_fine_tuning(logp: Float[Tensor, " tok"], layout: Layout) -> TokenLoss:
    """-sg(π)·log π of each trainable token (DFT, arXiv:2508.05629).

    The weight takes away the 1/π that makes unlikely tokens dominate the plain gradient.

    Example:
        >>> import torch
        >>> layout = Layout(mask=torch.tensor([True]), offsets=torch.tensor([0, 1]),
        ...                 groups=torch.tensor([0]))
        >>> dynamic_fine_tuning(torch.tensor([0.25]).log(), layout).per_token
        tensor([0.3466])
    """
    plain = negative_log_likelihood(logp, layout)
    chance = layout.on_mask(logp.detach().exp())
    return TokenLoss(per_token=chance * plain.per_token, metrics=plain.metrics)
