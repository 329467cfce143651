"""A mixture's layer in the place of Megatron's MLP: routed as in Hugging Face models.

Experts are stacked weights, as transformers has them. They are divided whole: over the ranks that
divide layers, which all have the same tokens and add their parts up, and over ranks that compute
different sequences, which exchange the tokens that chose each other's experts.
"""

from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from luyen.engine.tensor_parallel import TensorRanks
from luyen.models.batch_invariant import gather_rows
from luyen.models.batch_invariant_linear import grouped_linear
from luyen.models.experts import Routing, RoutingLog, is_grouped, route


@final
class RoutedExperts(nn.Module):
    """Router and this rank's experts of a layer; a pass gives it a log, if it keeps one."""

    def __init__(
        self, theirs: Any, number: int, ranks: TensorRanks, spread: dist.ProcessGroup
    ) -> None:
        """`theirs`: the layer of transformers; `number`: which routed layer it is, from 0."""
        super().__init__()
        self._number = number
        self._ranks, self._spread = ranks, spread
        self._experts, hidden = theirs.gate.weight.shape
        self._chosen: int = theirs.gate.top_k
        # Mixtral always divides by the sum.
        self._is_normalised = vars(theirs.gate).get("norm_topk_prob", True)
        self._parts = dist.get_world_size(spread)
        own = self._experts // (ranks.size * self._parts)
        _, width, _ = theirs.experts.gate_up_proj.shape
        self.router = nn.Parameter(torch.empty(self._experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(own, width, hidden))
        self.down = nn.Parameter(torch.empty(own, hidden, width // 2))
        self.log: RoutingLog | None = None
        self.has_shared = "shared_expert" in dict(theirs.named_children())
        """Whether an expert computes every token, as far as a gate of its own lets it through."""
        if self.has_shared:
            inner = theirs.shared_expert.down_proj.in_features // ranks.size
            self.shared_router = nn.Parameter(torch.empty(1, hidden))
            self.shared_gate_up = nn.Parameter(torch.empty(2 * inner, hidden))
            self.shared_down = nn.Parameter(torch.empty(hidden, inner))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`[tok, 1, hidden]` in and out; Megatron expects a bias with it."""
        x = read = hidden[:, 0]
        weights, chosen = self._route(x)
        x, weights = self._ranks.enter(x), self._ranks.enter(weights)
        made = self._outputs(x, chosen)
        parts = zip(weights.unbind(-1), made.unbind(1), strict=True)
        first, *rest = (weight[:, None] * part for weight, part in parts)
        total = sum(rest, start=first)
        if self.has_shared:
            through = self._ranks.enter(F.linear(read, self.shared_router).sigmoid())
            total = total + through * _expert(x, self.shared_gate_up, self.shared_down)
        return self._ranks.sum(total).to(x.dtype)[:, None], None

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[tok, k]` weights and experts of each token."""
        found = route(F.linear(x, self.router), self._chosen)
        probability, chosen = found.probability, found.experts
        if self.log is not None:
            chosen = self.log.experts_for(self._number, chosen, self._experts)
            self.log.add(self._number, Routing(probability=probability, experts=chosen))
        weights = probability.gather(-1, chosen)
        if self._is_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _outputs(self, x: Tensor, chosen: Tensor) -> Tensor:
        """`[tok, k, hidden]`, 0 for experts of other ranks that divide layers."""
        k, count = chosen.shape[-1], self._experts // self._ranks.size
        here = chosen.flatten() - self._ranks.rank * count
        here = here.masked_fill((here < 0) | (here >= count), count)
        by_expert, order = here.sort(stable=True)
        each = torch.arange(count + 1, device=x.device)
        sent = torch.searchsorted(by_expert, each).diff()
        total = int(sent.sum())
        rows = gather_rows(x, order[:total] // k)
        made = self._products(rows, sent) if self._parts == 1 else self._exchanged(rows, sent)
        made = torch.cat([made, made.new_zeros(len(order) - total, made.shape[1])])
        return made.index_select(0, order.argsort()).unflatten(0, (-1, k))

    def _exchanged(self, rows: Tensor, sent: Tensor) -> Tensor:
        """What experts of all ranks with different sequences make of rows, `sent` to each."""
        by_rank = sent.view(self._parts, -1)
        came = torch.empty_like(by_rank)
        dist.all_to_all_single(came, by_rank, group=self._spread)
        to, back = by_rank.sum(1).tolist(), came.sum(1).tolist()
        received = _exchange(rows, to, back, self._spread)
        # They come by rank and then by expert.
        expert = torch.arange(len(self.down), device=rows.device).repeat(self._parts)
        order = expert.repeat_interleave(came.flatten()).argsort(stable=True)
        made = self._products(received.index_select(0, order), came.sum(0))
        return _exchange(made.index_select(0, order.argsort()), back, to, self._spread)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Outputs of rows in the order of this rank's experts, so many for each."""
        if is_grouped(rows):
            offsets = F.pad(counts.cumsum(0), (1, 0))
            gate, up = grouped_linear(rows, self.gate_up, offsets).chunk(2, -1)
            return grouped_linear(F.silu(gate) * up, self.down, offsets)
        parts = rows.split(counts.tolist())
        # All of them, also without rows: every rank's backward pass goes through the exchange.
        each = zip(parts, self.gate_up.unbind(0), self.down.unbind(0), strict=True)
        return torch.cat([_expert(*one) for one in each])


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


class _Exchange(torch.autograd.Function):
    """The first rows go to the first rank, and so on; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, to: list[int], came: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.to, ctx.came, ctx.group = to, came, group
        found = x.new_empty(sum(came), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), came, to, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = grads[0].new_empty(sum(ctx.to), *grads[0].shape[1:])
        dist.all_to_all_single(back, grads[0].contiguous(), ctx.to, ctx.came, group=ctx.group)
        return back, None, None, None


def _exchange(x: Tensor, to: list[int], came: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send so many rows to each rank, and receive so many from each."""
    found: Any = _Exchange.apply(x, to, came, group)
    return found
