"""Scores of a chunk of logits and their gradient: by kernels on CUDA, by torch elsewhere.

The two agree up to rounding. On each side log-probabilities are those of its sampler, to the bit.
"""

from dataclasses import asdict, dataclass
from typing import final

import torch
from torch import Tensor

from luyen.models.steady import steady


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What happens between stored logits and the softmax, in the order of the fields.

    Example:
        >>> Form(vocabulary=3, scale=1.0, softcap=None, temperature=0.7).temperature
        0.7
    """

    vocabulary: int
    """Columns that count."""
    scale: float
    """Factor on the logits."""
    softcap: float | None
    """Logits are squashed to plus or minus this value."""
    temperature: float
    """What they are divided by."""


def score_logits(
    logits: Tensor, targets: Tensor, form: Form, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each target, log-sum-exp, entropy, sum of squares: a chunk of rows."""
    if logits.is_cuda:
        from luyen.models.cuda.vocabulary import score_rows

        return score_rows(
            logits, targets, **asdict(form), entropy=wanted[0], sum_pi_squared=wanted[2]
        )
    x, _ = _values(logits, form)
    lse = x.logsumexp(-1)
    # The sampler's formula: x - lse would differ from it in the last bit.
    logp = torch.log_softmax(x, -1)
    entropy = _entropy(logp) if wanted[0] else None
    peaked = (2 * logp).exp().sum(-1) if wanted[2] else None
    return logp.gather(-1, targets[:, None])[:, 0], lse, entropy, peaked


def _entropy(logp: Tensor) -> Tensor:
    """Of each row; what has no probability adds nothing. One tensor besides `logp` is made."""
    share = logp.exp().mul_(logp)
    return -share.masked_fill_(logp == -torch.inf, 0.0).sum(-1)


def logits_to_gradient(
    logits: Tensor,
    targets: Tensor,
    known: tuple[Tensor, Tensor | None],
    grads: tuple[Tensor, Tensor | None],
    form: Form,
) -> None:
    """Overwrite a chunk's logits with their gradient.

    `known` is the log-sum-exp and, if it has a gradient, the entropy; `grads` are those of the
    log-probability and of the entropy.
    """
    if logits.is_cuda:
        from luyen.models.cuda.vocabulary import score_rows_backward

        return score_rows_backward(logits, targets, *known, *grads, **asdict(form))
    x, slope = _values(logits, form)
    logp = x - known[0][:, None]
    if grads[1] is None or known[1] is None:
        gradient = logp.exp_().mul_(-grads[0][:, None])
    else:
        p = logp.exp()
        surprise = torch.where(p > 0, p * (logp + known[1][:, None]), 0.0)
        gradient = p * -grads[0][:, None] - grads[1][:, None] * surprise
    gradient.scatter_add_(-1, targets[:, None], grads[0][:, None].to(gradient.dtype))
    logits[:, : form.vocabulary] = gradient.mul_(slope)
    logits[:, form.vocabulary :] = 0
    return None


def _values(logits: Tensor, form: Form) -> tuple[Tensor, Tensor | float]:
    """What the softmax is taken of, and its derivative with respect to the stored logits."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    x = logits[:, : form.vocabulary].to(exact)
    # A factor of 1 would only copy the chunk.
    x = x if form.scale == 1.0 else x * form.scale
    slope = form.scale / form.temperature
    if form.softcap is None:
        return x if form.temperature == 1.0 else x / form.temperature, slope
    bend = steady(torch.tanh, x / form.softcap)
    return form.softcap * bend / form.temperature, slope * (1 - bend * bend)
