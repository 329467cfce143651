"""Learning from answers that are given: the negative log-likelihood of each token."""

from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses.inputs import TokenLoss
from luyen.algorithms.statistic import Average


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
