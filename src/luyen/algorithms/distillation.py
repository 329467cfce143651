"""Distillation: divergences between student and teacher per token, and on-policy advantages.

A row is a distribution over the vocabulary at one token. The teacher never gets a gradient.
"""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from luyen.algorithms.aggregation import Average
from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses.inputs import TokenLoss
from luyen.base.errors import UserError, did_you_mean

Rows = Float[Tensor, "tok vocab"]


def _kl(p: Rows, q: Rows) -> Float[Tensor, " tok"]:
    """Σ p (log p - log q); where p is 0 the term is 0, whatever q is."""
    gap = torch.where(p == -torch.inf, 0.0, p - q)
    return (p.exp() * gap).sum(-1)


def _reverse(student: Rows, teacher: Rows) -> Float[Tensor, " tok"]:
    return _kl(student, teacher)


def _forward(student: Rows, teacher: Rows) -> Float[Tensor, " tok"]:
    return _kl(teacher, student)


def _mixed(student: Rows, teacher: Rows, beta: float) -> Float[Tensor, " tok"]:
    """β·KL(teacher ‖ m) + (1 - β)·KL(student ‖ m) with m = β·teacher + (1 - β)·student."""
    share = torch.tensor(beta, dtype=student.dtype, device=student.device)
    # Two infinities would make the gradient of their sum NaN; e^-10000 is 0 in every type.
    student, teacher = student.clamp(min=-1e4), teacher.clamp(min=-1e4)
    middle = torch.logaddexp(student + torch.log1p(-share), teacher + torch.log(share))
    return beta * _kl(teacher, middle) + (1.0 - beta) * _kl(student, middle)


def reverse_kl(
    student: Rows, teacher: Rows, layout: Layout, *, chunk_tokens: int = 256
) -> TokenLoss:
    """KL(student ‖ teacher) at each token: the student keeps to what the teacher would say.

    Example:
        >>> layout = Layout(mask=torch.tensor([True]), offsets=torch.tensor([0, 1]),
        ...                 groups=torch.tensor([0]))
        >>> even, sure = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
        >>> reverse_kl(even, sure, layout).per_token
        tensor([0.1438])
    """
    return _by_chunks(_reverse, student, teacher, layout, chunk_tokens)


def forward_kl(
    student: Rows, teacher: Rows, layout: Layout, *, chunk_tokens: int = 256
) -> TokenLoss:
    """KL(teacher ‖ student) at each token: the student covers all that the teacher would say."""
    return _by_chunks(_forward, student, teacher, layout, chunk_tokens)


def generalised_jsd(
    student: Rows,
    teacher: Rows,
    layout: Layout,
    *,
    beta: float = 0.5,
    chunk_tokens: int = 256,
) -> TokenLoss:
    """β·KL(t ‖ m) + (1 - β)·KL(s ‖ m), m = β·t + (1 - β)·s, at each token (GKD, arXiv:2306.13649).

    β = 0 stands for the forward KL and β = 1 for the reverse KL, as in TRL: the formula itself is 0
    there, and they are its limits over β and over 1 - β.
    """
    if not 0.0 <= beta <= 1.0:
        raise UserError("beta", beta, "it is a share of the teacher", "set beta in [0, 1]")
    if beta == 0.0:
        return forward_kl(student, teacher, layout, chunk_tokens=chunk_tokens)
    if beta == 1.0:
        return reverse_kl(student, teacher, layout, chunk_tokens=chunk_tokens)

    def rows(s: Tensor, t: Tensor) -> Tensor:
        return _mixed(s, t, beta)

    return _by_chunks(rows, student, teacher, layout, chunk_tokens)


def forward_kl_topk(
    student: Float[Tensor, "tok vocab"],
    teacher_ids: Int[Tensor, "tok k"],
    teacher_logp: Float[Tensor, "tok k"],
    layout: Layout,
    *,
    chunk_tokens: int = 256,
) -> TokenLoss:
    """KL(teacher ‖ student) over the teacher's k likeliest ids and one bucket for the rest.

    The bucket holds what both leave over, so both sides are distributions: the value is at least 0,
    at most the full forward KL, and 0 where they agree on the k ids. With k the whole vocabulary it
    is the full forward KL.
    """

    def rows(s: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        picked = s.gather(-1, ids)
        return _kl(_with_rest(t), _with_rest(picked))

    return _by_chunks(rows, student, teacher_logp, layout, chunk_tokens, teacher_ids)


def row_divergences(
    divergence: str, student: Rows, teacher: Rows, *, beta: float, top_k: int
) -> Float[Tensor, " tok"]:
    """The divergence of each row by its name, for rows that are a chunk already.

    Names are those of `distill.divergence`; `beta` is read by jsd, `top_k` by topk_forward_kl.

    Example:
        >>> even, sure = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
        >>> row_divergences("topk_forward_kl", even, sure, beta=0.5, top_k=1)
        tensor([0.1308])
    """
    teacher = teacher.detach()
    match divergence:
        case "reverse_kl":
            return _reverse(student, teacher)
        case "forward_kl":
            return _forward(student, teacher)
        case "jsd":
            ends = {0.0: _forward, 1.0: _reverse}
            return ends[beta](student, teacher) if beta in ends else _mixed(student, teacher, beta)
        case "topk_forward_kl":
            likeliest = teacher.topk(min(top_k, teacher.shape[-1]), -1)
            picked = student.gather(-1, likeliest.indices)
            return _kl(_with_rest(likeliest.values), _with_rest(picked))
        case _:
            known = ["reverse_kl", "forward_kl", "jsd", "topk_forward_kl"]
            fix = did_you_mean(divergence, known)
            raise UserError("distill.divergence", divergence, "no such divergence", fix)


def _with_rest(logp: Float[Tensor, "tok k"]) -> Float[Tensor, "tok bucket"]:
    """The rows with one more entry: log of what their probabilities leave over.

    A rest below the resolution of the type counts as that resolution, so that its log is finite.
    """
    left = 1.0 - logp.exp().sum(-1, keepdim=True)
    return torch.cat([logp, left.clamp(min=torch.finfo(logp.dtype).eps).log()], -1)


def _by_chunks(
    rows: Callable[..., Tensor],
    student: Rows,
    teacher: Float[Tensor, "tok entry"],
    layout: Layout,
    chunk_tokens: int,
    ids: Int[Tensor, "tok entry"] | None = None,
) -> TokenLoss:
    """A divergence of each trainable token, a chunk of them at a time.

    What a chunk computes is computed again in the backward pass instead of being kept.
    """
    if chunk_tokens < 1:
        raise UserError("chunk_tokens", chunk_tokens, "a chunk holds tokens", "set 1 or more")
    trains = layout.mask.nonzero().squeeze(-1)
    fixed = [teacher.detach()] if ids is None else [teacher.detach(), ids]
    parts: list[Tensor] = []
    for start in range(0, trains.numel(), chunk_tokens):
        place = trains[start : start + chunk_tokens]
        given = [student[place], *(x[place] for x in fixed)]
        parts.append(cast(Tensor, checkpoint(rows, *given, use_reentrant=False)))
    values = torch.cat(parts) if parts else student.new_zeros(0)
    per_token = student.new_zeros(layout.mask.shape[0]).index_copy(0, trains, values)
    metrics = {"distill/divergence": Average.over(per_token, layout.mask)}
    return TokenLoss(per_token=per_token, metrics=metrics)


# On-policy distillation from the sampled tokens alone: no rows over the vocabulary are needed.


def distillation_advantages(
    logp: Float[Tensor, " tok"],
    teacher_logp: Float[Tensor, " tok"],
    layout: Layout,
    *,
    distillation_loss_coef: float = 1.0,
) -> Float[Tensor, " tok"]:
    """coef·(log teacher - log student) of each token the student sampled, without a gradient.

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
