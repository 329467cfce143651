"""From hidden states to log-probabilities and entropy: one function for trainer and sampler.

Logits of a chunk of tokens exist at a time. With gradients, a chunk's logits are computed again in
the backward pass instead of being kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from luyen.models.batch_invariant import batch_invariant
from luyen.models.batch_invariant_linear import product_of
from luyen.models.fused.packed_linear import Product

# Scores of a chunk of logits and their gradient: by kernels on CUDA, by torch otherwise.
#
# The two agree up to rounding. On each side log-probabilities are those of its sampler, to the
# bit.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What happens between stored logits and the softmax, in the order of the fields.

    Example:
        >>> LogitTransform(vocabulary=3, scale=1.0, softcap=None, temperature=0.7).temperature
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
    logits: Tensor, targets: Tensor, form: LogitTransform, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each target, log-sum-exp, entropy, sum of squares: a chunk of rows."""
    if logits.is_cuda:
        from luyen.models.cuda.logprob_kernels import score_rows

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
    form: LogitTransform,
) -> None:
    """Overwrite a chunk's logits with their gradient.

    `known` is the log-sum-exp and, if it has a gradient, the entropy; `grads` are those of the
    log-probability and of the entropy.
    """
    if logits.is_cuda:
        from luyen.models.cuda.logprob_kernels import score_rows_backward

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


def _values(logits: Tensor, form: LogitTransform) -> tuple[Tensor, Tensor | float]:
    """What the softmax is taken of, and its derivative with respect to the stored logits."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    x = logits[:, : form.vocabulary].to(exact)
    # A factor of 1 would only copy the chunk.
    x = x if form.scale == 1.0 else x * form.scale
    slope = form.scale / form.temperature
    if form.softcap is None:
        return x if form.temperature == 1.0 else x / form.temperature, slope
    bend = batch_invariant(torch.tanh, x / form.softcap)
    return form.softcap * bend / form.temperature, slope * (1 - bend * bend)


# From hidden states to scores with logits of a chunk of rows alive at a time, in both
# directions.
#
# The forward pass keeps two numbers a row. The backward pass computes a chunk's logits again,
# turns them into their own gradient in place, and adds its share to the gradients of the
# inputs.

_NUMBERS_CUDA = 1 << 27
_NUMBERS_CPU = 1 << 23
"""Logits that exist at once."""

Scores: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probability, entropy and sum of squared probabilities."""


def fused_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    vocabulary: int,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    sum_pi_squared: bool = False,
    product: Product = F.linear,
) -> Scores:
    """Scores of each row's target under the softmax of `hidden @ weight.T + bias`, in float32.

    Gradients reach `hidden`, `weight` and `bias` through the log-probability and, with
    `entropy_gradient`, through the entropy. The weight's is summed over chunks in float32. What is
    not requested is None. `product` makes the logits, with the values of `F.linear`.
    """
    form = LogitTransform(
        vocabulary=vocabulary, scale=scale, softcap=softcap, temperature=temperature
    )
    wanted = (entropy, entropy_gradient, sum_pi_squared)
    found: Any = _FusedScores.apply(hidden, weight, bias, targets, form, wanted, product)
    return found


@final
class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: LogitTransform,
        wanted: tuple[bool, bool, bool],
        product: Product,
    ) -> Scores:
        chunks = [
            score_logits(product(hidden[rows], weight, bias), targets[rows], form, wanted)
            for rows in _row_chunks(hidden, weight)
        ]
        logp, lse, entropy, peaked = (
            None if column[0] is None else torch.cat(column) for column in zip(*chunks, strict=True)
        )
        assert logp is not None
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.form, ctx.product = form, product
        ctx.set_materialize_grads(False)
        fixed = [entropy if not wanted[1] else None, peaked]
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return logp, entropy, peaked

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        grad_logp, grad_entropy, _ = grads
        nothing: tuple[None, ...] = (None,) * 4
        needs: tuple[bool, ...] = ctx.needs_input_grad[:3]
        if grad_logp is None and grad_entropy is None:
            return None, None, None, *nothing
        if grad_logp is None:
            grad_logp = torch.zeros_like(lse)
        sums = _GradientSums(hidden, weight, bias, needs)
        for rows in _row_chunks(hidden, weight):
            logits = ctx.product(hidden[rows], weight, bias)
            of_entropy = None if grad_entropy is None else grad_entropy[rows]
            known = (lse[rows], None if of_entropy is None else entropy[rows])
            logits_to_gradient(
                logits, targets[rows], known, (grad_logp[rows], of_entropy), ctx.form
            )
            sums.add(rows, logits)
        return *sums.finished(), *nothing


@final
class _GradientSums:
    """The gradients of a projection's inputs, added up over chunks of rows."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self._inputs = (hidden, weight, bias)
        self._hidden = torch.empty_like(hidden) if needs[0] else None
        # float64 stays float64, so that the arithmetic can be checked in it.
        exact = torch.promote_types(weight.dtype, torch.float32)
        self._weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        wants_bias = bias is not None and needs[2]
        self._bias = weight.new_zeros(weight.shape[0], dtype=exact) if wants_bias else None

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Take the gradient of the logits of these rows into account."""
        hidden, weight, _ = self._inputs
        if self._hidden is not None:
            torch.mm(gradient, weight, out=self._hidden[rows])
        if self._weight is not None:
            self._weight += _product(gradient.t(), hidden[rows])
        if self._bias is not None:
            self._bias += gradient.sum(0, dtype=self._bias.dtype)

    def finished(self) -> tuple[Tensor | None, ...]:
        """The sums, each in the type of what it is the gradient of."""
        sums = (self._hidden, self._weight, self._bias)
        return tuple(
            s if s is None or x is None else s.to(x.dtype)
            for s, x in zip(sums, self._inputs, strict=True)
        )


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose result is at least float32."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _row_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Ranges of rows; one empty range if there is no row."""
    numbers = _NUMBERS_CUDA if hidden.is_cuda else _NUMBERS_CPU
    size = max(1, numbers // weight.shape[0])
    for first in range(0, max(1, hidden.shape[0]), size):
        yield slice(first, min(first + size, hidden.shape[0]))


_CHUNK_NUMBERS = 1 << 24
"""Logits that exist at once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """The output layer with what an architecture does to logits after it.

    Example:
        >>> head = Head(linear=nn.Linear(2, 4, bias=False), vocabulary=3)
        >>> head.logits(torch.zeros(1, 2), temperature=1.0)
        tensor([[0., 0., 0.]], grad_fn=<SliceBackward0>)
    """

    linear: nn.Module
    """The projection to the vocabulary."""
    vocabulary: int
    """Ids the tokenizer knows; rows of the projection beyond them are never sampled or scored."""
    softcap: float | None = None
    """Logits are squashed to plus or minus this value (Gemma 2)."""
    scale: float = 1.0
    """Factor on the logits (Cohere, Granite)."""
    is_fused: bool = False
    """Whether scores are computed without keeping logits; on CUDA they always are."""
    part_rows: int | None = None
    """Rows of the vocabulary that are summed at a time, those of a rank; None: all at once."""

    def logits(self, hidden: Tensor, *, temperature: float) -> Tensor:
        """fp32 logits `[n, vocabulary]`, temperature applied."""
        logits = self.from_linear(self.linear(hidden))
        return logits if temperature == 1.0 else logits / temperature

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Log-softmax in fp32, with the sums of the trainer."""
        if self.part_rows is None:
            return log_probabilities(logits)
        missing = -logits.shape[-1] % self.part_rows
        parts = F.pad(logits, (0, missing), value=-torch.inf).split(self.part_rows, -1)
        top = logits.amax(-1)
        first, *rest = (sum_exponentials(part, top) for part in parts)
        return logits - log_of_sum(top, sum(rest, first))[:, None]

    def from_linear(self, raw: Tensor) -> Tensor:
        """fp32 logits of the known vocabulary from what the projection gave."""
        logits = raw[:, : self.vocabulary].float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * batch_invariant(torch.tanh, logits / self.softcap)
        return logits


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """What is known of each target token.

    Example:
        >>> TokenScores(logp=torch.zeros(1), entropy=None, sum_pi_squared=None).logp
        tensor([0.])
    """

    logp: Tensor
    """Log-probability of the target."""
    entropy: Tensor | None
    """Entropy of the distribution it was sampled from, in nats."""
    sum_pi_squared: Tensor | None
    """Sum of the squared probabilities of that distribution."""
    is_likeliest: Tensor | None = None
    """1 where no token is likelier than the target, else 0, if it was asked for."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenScores":
        """Every stream that is there, changed."""
        streams = {"entropy": self.entropy, "sum_pi_squared": self.sum_pi_squared}
        streams["is_likeliest"] = self.is_likeliest
        changed = {name: None if x is None else change(x) for name, x in streams.items()}
        return TokenScores(logp=change(self.logp), **changed)


@torch.no_grad()
def likeliest_targets(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """1 where no token is likelier than the target, else 0: one more product of the head."""
    size = max(1, _CHUNK_NUMBERS // head.vocabulary)
    found = [
        (logits.gather(-1, t[:, None])[:, 0] >= logits.amax(-1)).float()
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
        for logits in (head.logits(h, temperature=1.0),)
    ]
    return torch.cat(found)


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-softmax in fp32. The only one: another formula would differ in the last bit."""
    return torch.log_softmax(logits, -1)


def sum_exponentials(x: Tensor, top: Tensor) -> Tensor:
    """Of each row above its largest number `top`; the same bits among any number of rows."""
    return batch_invariant(torch.exp, x - top[:, None]).sum(-1)


def log_of_sum(top: Tensor, total: Tensor) -> Tensor:
    """The log-sum-exp, given the sum of exponentials above the largest number."""
    return top + batch_invariant(torch.log, total)


def score(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    sum_pi_squared: bool = False,
) -> TokenScores:
    """Log-probability of each target given its hidden state, chunk by chunk.

    Without `entropy_gradient` the entropy is a number to report, and keeps no logits alive.
    """
    if (hidden.is_cuda or head.is_fused) and isinstance(head.linear, nn.Linear):
        wanted = (entropy, entropy_gradient, sum_pi_squared)
        return _fused(head, head.linear, hidden, targets, temperature, wanted)
    size = max(1, _CHUNK_NUMBERS // head.vocabulary)
    chunks = [
        _maybe_checkpointed(
            head,
            h,
            t,
            temperature,
            (entropy, entropy_gradient),
            sum_pi_squared,
            hidden.shape[0] > size,
        )
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    columns = [list(column) for column in zip(*chunks, strict=True)]
    chosen, spread, peaked = (
        torch.cat([x for x in column if x is not None]) if column[0] is not None else None
        for column in columns
    )
    assert chosen is not None
    return TokenScores(logp=chosen, entropy=spread, sum_pi_squared=peaked)


def _fused(
    head: Head,
    linear: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    wanted: tuple[bool, bool, bool],
) -> TokenScores:
    """One pass over the logits, which are computed again for the gradient."""
    chosen, spread, peaked = fused_scores(
        hidden,
        linear.weight,
        linear.bias,
        targets,
        vocabulary=head.vocabulary,
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        entropy=wanted[0],
        entropy_gradient=wanted[1],
        sum_pi_squared=wanted[2],
        product=product_of(linear),
    )
    return TokenScores(logp=chosen, entropy=spread, sum_pi_squared=peaked)


def _maybe_checkpointed(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: tuple[bool, bool],
    sum_pi_squared: bool,
    is_long: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    def run(h: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logp = log_probabilities(head.logits(h, temperature=temperature))
        chosen = logp.gather(-1, targets[:, None])[:, 0]
        shown = logp if entropy[1] else logp.detach()
        spread = -(shown.exp() * shown).sum(-1) if entropy[0] else None
        peaked = (2 * logp.detach()).exp().sum(-1) if sum_pi_squared else None
        return chosen, spread, peaked

    if is_long and torch.is_grad_enabled():
        return checkpoint(run, hidden, use_reentrant=False)
    return run(hidden)
