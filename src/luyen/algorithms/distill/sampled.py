"""On-policy distillation from the sampled tokens alone: no rows over the vocabulary are needed."""

from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.layout import Layout


def distillation_advantages(
    logp: Float[Tensor, " tok"],
    teacher_logp: Float[Tensor, " tok"],
    layout: Layout,
    *,
    distillation_loss_coef: float = 1.0,
) -> Float[Tensor, " tok"]:
    """coef·(log teacher - log student) of each token the student drew, without a gradient.

    As an advantage of a policy gradient its expected direction lowers the reverse KL of each
    token's distribution. Added to the advantages of a task reward, it mixes the two.

    Example:
        >>> import torch
        >>> layout = Layout(mask=torch.tensor([True, False]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> x = torch.tensor([-2.0, float("nan")])
        >>> distillation_advantages(x, x + 0.5, layout)
        tensor([0.5000, 0.0000])
    """
    gap = layout.on_mask(teacher_logp) - layout.on_mask(logp)
    return distillation_loss_coef * gap.detach()
