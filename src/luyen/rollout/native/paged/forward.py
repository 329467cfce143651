"""Decode passes on the device, captured as CUDA graphs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias, final

import torch
from torch import Tensor

from luyen.models.device_lock import MODES
from luyen.models.head import Head
from luyen.models.policy import Policy
from luyen.rollout.native.paged.device_state import RowState, StepNeeds
from luyen.rollout.native.paged.graphs import GraphCache
from luyen.rollout.native.paged.kv_cache import KeyValues, PagedDecodeContext
from luyen.rollout.native.sampler import (
    NextTokens,
    TopTokens,
    likeliest,
    sample_tokens,
    uniforms,
)


@torch.no_grad()
def decode_step(
    policy: Policy,
    cache: KeyValues,
    state: RowState,
    rows: int,
    *,
    needs: StepNeeds,
    is_split: bool,
    members: int = 0,
) -> None:
    """One token for each of the first `rows` rows that is active.

    Groups of up to `members` rows read their shared pages together; 0: none.
    """
    here = slice(0, rows)
    place, slots, lengths = state.begin(here)
    context = PagedDecodeContext(
        cache=cache,
        slots=slots,
        tables=state.tables[here],
        lengths=lengths,
        is_split=is_split,
        arrivals=state.arrivals,
        groups=state.groups.of(rows, members) if members else None,
    )
    hidden = policy.hidden(state.tokens[here], place, context)
    sampled = sample_next(policy.head, hidden, state, here, needs)
    state.accept(here, sampled, is_cached=True)


def sample_next(
    head: Head, hidden: Tensor, state: RowState, here: slice, needs: StepNeeds
) -> NextTokens:
    """The next token of each row in `here`, given its last hidden state."""
    keys, count, greedy = state.keys[here], state.generated[here], state.greedy[here]
    temperature = state.temperature[here]
    limits = state.truncation(here) if needs.is_truncated else None
    allowed = None
    if needs.is_constrained:
        assert state.allowed is not None, "what constraints allow is written before a step"
        allowed = state.allowed[here]
    if not hidden.is_cuda:
        logits = head.logits(hidden, temperature=1.0) / temperature[:, None]
        number = uniforms(keys, count)
        return sample_tokens(logits, number, greedy, limits, allowed=allowed, top=needs.top)
    raw = head.linear(hidden)
    sampled = _sample_cuda(head, raw, keys, count, temperature, greedy)
    if limits is not None:
        logits = head.from_linear(raw) / temperature[:, None]
        with MODES:  # it sums floats, which PyTorch's deterministic mode refuses
            cut = sample_tokens(logits, uniforms(keys, count), greedy, limits, allowed=allowed)
        # Rows without truncation get the same token whatever the rest of the batch does.
        tokens = torch.where(state.is_truncated(here), cut.tokens, sampled.tokens)
        sampled = replace(cut, tokens=tokens, logps=_score_cuda(head, raw, tokens, temperature))
    if needs.top:
        sampled = replace(sampled, top=_likeliest_cuda(head, raw, temperature, needs.top))
    return sampled


def _likeliest_cuda(head: Head, raw: Tensor, temperature: Tensor, count: int) -> TopTokens:
    """The likeliest tokens, with the log-probabilities that they have when they are sampled."""
    best = likeliest(head.from_linear(raw) / temperature[:, None], count)
    columns = [_score_cuda(head, raw, ids, temperature) for ids in best.ids.unbind(1)]
    return best.with_logps(torch.stack(columns, 1))


def _sample_cuda(
    head: Head, raw: Tensor, keys: Tensor, count: Tensor, temperature: Tensor, greedy: Tensor
) -> NextTokens:
    """Two kernels over the logits."""
    from luyen.models.cuda.sampling_kernels import sample_rows

    tokens, logps = torch.empty_like(count), torch.empty_like(temperature)
    sample_rows(
        raw,
        keys,
        count,
        temperature,
        greedy,
        vocabulary=head.vocabulary,
        scale=head.scale,
        softcap=head.softcap,
        out_tokens=tokens,
        out_logps=logps,
    )
    return NextTokens(tokens=tokens, logps=logps, kept=None)


def _score_cuda(head: Head, raw: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities by the trainer's kernel: another formula would differ in the last bit."""
    from luyen.models.cuda.logprob_kernels import score_rows

    return score_rows(
        raw,
        tokens,
        vocabulary=head.vocabulary,
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        entropy=False,
        sum_pi_squared=False,
    )[0]


# Decode steps as CUDA graphs, captured once per number of rows and kind of step.

_FEW_PROGRAMS = 288
"""Rows x heads up to which a row is always spread over several programs (measured on an H200)."""
_UNEVEN = 1.25
"""Longest row over the mean row from which on more rows are, too: whole ones end too far apart."""

_Kind: TypeAlias = tuple[int, StepNeeds, bool, int]
"""Rows, what they need, whether rows are spread, and members of a group at most."""


def bucket(rows: int, most: int) -> int:
    """The number of rows that is computed for `rows`: the next power of two, or one between.

    Example:
        >>> [bucket(n, 300) for n in (1, 3, 33, 65, 200, 290)]
        [1, 4, 48, 96, 256, 300]
    """
    size = 1
    while size < rows:
        size *= 2
    if size > 32 and rows <= size * 3 // 4:
        size = size * 3 // 4
    return min(size, most)


def is_spread(rows: int, heads: int, lengths: Sequence[int]) -> bool:
    """Whether the keys of a row are spread over several programs; `rows` are those of the bucket.

    Example:
        >>> [is_spread(256, 3, n) for n in ([900, 1000], [100, 1000])]
        [False, True]
    """
    is_uneven = max(lengths) * len(lengths) > _UNEVEN * sum(lengths)
    return rows * heads <= _FEW_PROGRAMS or is_uneven


@final
class DecodeGraphs:
    """Runs decode steps, as captured graphs where that is possible."""

    def __init__(self, policy: Policy, *, heads: int, is_eager: bool) -> None:
        """`heads` is how many heads of keys and values a layer has."""
        self._policy = policy
        self._heads = heads
        is_eager = is_eager or policy.device.type != "cuda"
        self._graphs = GraphCache[_Kind]("decode steps", is_eager=is_eager)

    def prepare(self, cache: KeyValues, state: RowState) -> None:
        """Forget graphs whose tensors have moved; called when a batch of requests begins."""
        self._graphs.prepare(self._policy, cache.address, state.tokens.data_ptr())

    def clear(self) -> None:
        """Forget every graph and the memory behind it."""
        self._graphs.clear()

    def run(
        self,
        cache: KeyValues,
        state: RowState,
        lengths: Sequence[int],
        count: int,
        needs: StepNeeds,
    ) -> None:
        """`count` decode steps of the first rows, which have about these lengths."""
        members = 0 if self._policy.is_exact else state.groups.most
        rows = bucket(len(lengths), state.rows)
        kind = (rows, needs, is_spread(rows, self._heads, lengths), members)
        step = partial(self._step, cache, state, kind)
        with _inactive_while_captured(state, kind in self._graphs):
            graph = self._graphs.get(kind, step)
        for _ in range(count):
            if graph is None:
                step()
            else:
                graph.replay()

    def _step(self, cache: KeyValues, state: RowState, kind: _Kind) -> None:
        size, needs, is_split, members = kind
        decode_step(
            self._policy,
            cache,
            state,
            size,
            needs=needs,
            is_split=is_split,
            members=members,
        )


@contextmanager
def _inactive_while_captured(state: RowState, is_captured: bool) -> Iterator[None]:
    """All rows are inactive where a step is captured, so that nothing is generated."""
    if is_captured:
        yield
        return
    active, tick = state.active.clone(), state.tick.clone()
    state.active.zero_()
    state.tick.zero_()
    try:
        yield
    finally:
        state.active.copy_(active)
        state.tick.copy_(tick)
