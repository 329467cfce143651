"""Prefill and decode passes on the device; decode steps are captured as CUDA graphs."""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from luyen.models.device_lock import CALLS, MODES
from luyen.models.head import Head
from luyen.models.paged_attention import PAGE, Chunks, sent
from luyen.models.policy import Policy
from luyen.rollout.native.paged.device_state import RowState, StepNeeds
from luyen.rollout.native.paged.kv_cache import KeyValues, PagedDecodeContext, PagedPrefillContext
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


# Prefill: prompts are packed into passes within a token budget, long ones in several chunks.


def prefill_prompts(
    policy: Policy,
    cache: KeyValues,
    prompts: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    *,
    tokens_at_once: int,
    known: Sequence[int] | None = None,
) -> Tensor:
    """Fill the pages of each prompt, and give the last hidden state of each, `[prompts, hidden]`.

    The first `known` tokens of a prompt are in its pages already. A result does not depend on the
    budget, nor on what is known: chunks look at their predecessors through the pages.
    """
    device = policy.device
    # One transfer for all tokens and tables; passes take slices of them on the device.
    flat = array("q")
    for prompt in prompts:
        flat.extend(prompt)
    tokens = sent(flat, device, torch.int64)
    widest = max(len(some) for some in pages)
    rows = [[*some, *[0] * (widest - len(some))] for some in pages]
    tables = sent(rows, device, torch.int32)
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    last: list[Tensor] = [torch.empty(0)] * len(prompts)
    begun = known or [0] * len(prompts)
    for part in _passes([len(prompt) for prompt in prompts], begun, tokens_at_once):
        hidden = _prefill_pass(policy, cache, tokens, tables, starts, part)
        end = 0
        for index, _, count in part:
            end += count
            last[index] = hidden[end - 1]
    return torch.stack(last)


def _passes(
    lengths: Sequence[int], known: Sequence[int], budget: int
) -> list[list[tuple[int, int, int]]]:
    """(prompt, first token, tokens) of each chunk, pass by pass.

    Example:
        >>> _passes([5, 3], [0, 1], 4)
        [[(0, 0, 4)], [(0, 4, 1), (1, 1, 2)]]
    """
    passes: list[list[tuple[int, int, int]]] = [[]]
    room = budget
    for index, (length, done) in enumerate(zip(lengths, known, strict=True)):
        while done < length:
            if room == 0:
                passes.append([])
                room = budget
            count = min(length - done, room)
            passes[-1].append((index, done, count))
            done += count
            room -= count
    return passes


def _prefill_pass(
    policy: Policy,
    cache: KeyValues,
    tokens: Tensor,
    tables: Tensor,
    starts: Sequence[int],
    part: list[tuple[int, int, int]],
) -> Tensor:
    device = tokens.device
    columns = sent(part, device)
    prompt, done, count = columns.unbind(1)
    total = sum(count for *_, count in part)
    owner = torch.repeat_interleave(
        torch.arange(len(part), device=device), count, output_size=total
    )
    first = torch.cumsum(count, 0) - count
    place = torch.arange(total, device=device) - first[owner] + done[owner]
    begins = sent([starts[index] for index, *_ in part], device)
    table = tables[prompt]
    page = table[owner, place // PAGE].long()
    context = PagedPrefillContext(
        cache=cache,
        slots=page * PAGE + place % PAGE,
        tables=table,
        chunks=Chunks.of(
            [count for *_, count in part], [done + count for _, done, count in part], device=device
        ),
    )
    return policy.hidden(tokens[begins[owner] + place], place, context)


# Decode steps as CUDA graphs, captured once per number of rows and kind of step.

_FEW_PROGRAMS = 288
"""Rows x heads up to which a row is always spread over several programs (measured on an H200)."""
_UNEVEN = 1.25
"""Longest row over the mean row from which on more rows are, too: whole ones end too far apart."""
_WARM_UP = 2
_LOG = logging.getLogger(__name__)

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
    """Runs decode steps, as captured graphs where that is possible.

    Graphs hold addresses. They are captured again when the weights, the pages or the rows have
    moved.
    """

    def __init__(self, policy: Policy, *, heads: int, is_eager: bool) -> None:
        """`heads` is how many heads of keys and values a layer has."""
        self._policy = policy
        self._heads = heads
        self._is_eager = is_eager or policy.device.type != "cuda"
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None

    def prepare(self, cache: KeyValues, state: RowState) -> None:
        """Forget graphs whose tensors have moved; called when a batch of requests begins."""
        if self._is_eager:
            return
        weights = (p.data_ptr() for p in self._policy.parameters())
        found = (*weights, cache.address, state.tokens.data_ptr(), self._policy.is_exact)
        if found != self._addresses:
            self.clear()
            self._addresses = found

    def clear(self) -> None:
        """Forget every graph and the memory behind it."""
        self._graphs.clear()
        self._pool = None

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
        graph = self._graph(cache, state, kind)
        for _ in range(count):
            if graph is None:
                self._step(cache, state, kind)
            else:
                graph.replay()

    def _graph(self, cache: KeyValues, state: RowState, kind: _Kind) -> torch.cuda.CUDAGraph | None:
        """The graph of one step, captured at first need; None: steps are launched one by one.

        While another thread trains nothing is captured.
        """
        if self._is_eager or kind in self._graphs:
            return self._graphs.get(kind)
        if not CALLS.acquire(blocking=False):
            return None
        try:
            self._graphs[kind] = self._capture(cache, state, kind)
        except RuntimeError as error:
            self._fall_back_to_eager(error)
        finally:
            CALLS.release()
        return self._graphs.get(kind)

    def _fall_back_to_eager(self, error: RuntimeError) -> None:
        """Go on without graphs: some layers copy from the host, which cannot be captured."""
        if not any(word in str(error) for word in ("captur", "operation not permitted")):
            raise error
        torch.cuda.synchronize()
        self.clear()
        self._is_eager = True
        reason = str(error).splitlines()[0]
        _LOG.warning("decode steps of this model cannot be captured as graphs (%s)", reason)

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

    def _capture(self, cache: KeyValues, state: RowState, kind: _Kind) -> torch.cuda.CUDAGraph:
        """A graph of one step. All rows are inactive during capture, so nothing is generated."""
        active, tick = state.active.clone(), state.tick.clone()
        state.active.zero_()
        try:
            return self._record(cache, state, kind)
        finally:
            state.active.copy_(active)
            state.tick.copy_(tick)

    def _record(self, cache: KeyValues, state: RowState, kind: _Kind) -> torch.cuda.CUDAGraph:
        """Two steps that warm up, then one that is captured."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                state.tick.zero_()
                self._step(cache, state, kind)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(cache, state, kind)
        self._pool = self._pool or graph.pool()
        return graph
