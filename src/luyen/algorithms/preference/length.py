"""From tokens to sequences: sums of log-probabilities, plain or with a lighter tail.

LD-DPO (arXiv:2409.06411) weighs the tokens beyond the length of the shorter answer of a pair by
`ld_alpha`, since what an answer says there the other had no room to say.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError


def token_weights(
    layout: Layout, shared: Int[Tensor, " seq"], *, ld_alpha: float
) -> Float[Tensor, " tok"]:
    """1 on the first `shared` trainable tokens of a sequence, ld_alpha on its others, 0 elsewhere.

    Example:
        >>> layout = Layout(mask=torch.tensor([False, True, True, True]),
        ...                 offsets=torch.tensor([0, 4]), groups=torch.tensor([0]))
        >>> token_weights(layout, torch.tensor([2]), ld_alpha=0.5).tolist()
        [0.0, 1.0, 1.0, 0.5]
    """
    if not 0.0 <= ld_alpha <= 1.0:
        why = "it weighs the tokens that only the longer answer has"
        raise UserError("ld_alpha", ld_alpha, why, "set ld_alpha in [0, 1]")
    counted = torch.cumsum(layout.mask.long(), 0)
    before = torch.nn.functional.pad(counted, (1, 0))[layout.offsets[:-1]]
    place = counted - before[layout.segment]
    weights = torch.where(place <= shared[layout.segment], 1.0, ld_alpha)
    return layout.on_mask(weights)


def sequence_sums(
    logp: Float[Tensor, " tok"],
    layout: Layout,
    weights: Float[Tensor, " tok"] | None = None,
) -> Float[Tensor, " seq"]:
    """Sum of log-probabilities over the trainable tokens of each sequence, weighted or plain.

    The weights of `token_weights` go to the policy and to the reference alike.
    """
    clean = layout.on_mask(logp)
    return layout.sum(clean if weights is None else clean * weights.to(clean.dtype))
