"""Continuous batching on a GPU, one round of decode steps ahead of the host.

While the device decodes a round, the host reads the round before: it looks for stop strings, frees
pages and admits waiting requests. A row that sampled a stop token becomes inactive on the device at
once. A row depends only on its own tokens and key.
"""

from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.paged_attention import PAGE, sent
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint
from luyen.rollout.native.paged.device_state import RowState, StepNeeds
from luyen.rollout.native.paged.forward import DecodeGraphs, bucket, sample_next
from luyen.rollout.native.paged.kv_cache import (
    KeyValues,
    PagePool,
    affordable_pages,
    cache_shape,
    pages_of,
)
from luyen.rollout.native.paged.prefill import PromptReader
from luyen.rollout.native.paged.scheduler import (
    ROUND,
    AdmittedGroup,
    PagedScheduler,
    RunningSequence,
    page_demand,
    prefix_tokens,
)
from luyen.rollout.native.prefix_cache import CacheCounts, WeightGuard
from luyen.rollout.native.sampler import TopTokens
from luyen.rollout.native.sequences import Decode, Row
from luyen.rollout.protocol import (
    CacheStats,
    Completion,
    Ending,
    Request,
    TokenStream,
    TopLogps,
    refuse_impossible,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRound:
    """Tokens of a launched round that the host has not read yet.

    Example:
        Made by `fetch_round` for every round of decode steps.
    """

    sequences: list[RunningSequence]
    """The sequence of each column."""
    tokens: Tensor
    """`[steps, rows]` on the host once `ready`."""
    logps: Tensor
    """Their log-probabilities."""
    kept: Tensor | None
    """Mass that truncation left, if any row truncates."""
    top: TopTokens | None
    """`[steps, rows, count]` likeliest tokens, if any row reports them."""
    ready: torch.cuda.Event | None
    """When the device has written them; None: they are there."""

    def read(self, decode: Decode) -> list[tuple[RunningSequence, Ending]]:
        """Append the tokens to their rows; the sequences that ended, and why.

        Tokens after the end of a row, or after its eviction, are dropped.
        """
        if self.ready is not None:
            self.ready.synchronize()
        tokens, logps = self.tokens.T.tolist(), self.logps.T.tolist()
        kept = self.kept.T.tolist() if self.kept is not None else None
        ended: list[tuple[RunningSequence, Ending]] = []
        for column, sequence in enumerate(self.sequences):
            if sequence.is_over:
                continue
            masses = kept[column] if kept is not None else None
            tops = self._tops(column, sequence.row.request.sampling.top_logprobs)
            reason = sequence.row.extend(tokens[column], logps[column], masses, decode, tops)
            if reason is not None:
                ended.append((sequence, reason))
        return ended

    def _tops(self, column: int, count: int) -> list[TopLogps] | None:
        """The `count` likeliest tokens of a row at each step; None where it reports none."""
        if self.top is None or count == 0:
            return None
        ids = self.top.ids[:, column, :count].tolist()
        logps = self.top.logps[:, column, :count].tolist()
        return [tuple(zip(*step, strict=True)) for step in zip(ids, logps, strict=True)]


def fetch_round(
    state: RowState,
    sequences: list[RunningSequence],
    here: slice,
    count: int,
    needs: StepNeeds,
) -> DecodeRound:
    """Start copying the results of the last `count` steps to the host, without waiting."""

    def fetch(out: Tensor) -> Tensor:
        found = out[:count, here]
        return found.to("cpu", non_blocking=True) if found.is_cuda else found.clone()

    tokens, logps = fetch(state.out_tokens), fetch(state.out_logps)
    kept, top, ready = None, None, None
    if needs.is_truncated:
        kept = fetch(state.out_kept)
    if needs.top:
        top = TopTokens(ids=fetch(state.out_top_ids), logps=fetch(state.out_top_logps))
    if state.tokens.is_cuda:
        ready = torch.cuda.Event()
        ready.record()
    return DecodeRound(
        sequences=sequences, tokens=tokens, logps=logps, kept=kept, top=top, ready=ready
    )


_STOPS = 8
"""Stop tokens of a row that the device knows; the host sees all of them, a round later."""


@final
class PagedEngine:
    """The embedded engine over paged keys and values; its weights are the trainer's own."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        decode: Decode,
        most_pages: int | None = None,
        is_open: bool = False,
        enable_prefix_caching: bool = True,
    ) -> None:
        """`decode` turns tokens into text, for stop strings; `most_pages` caps the pool.

        `is_open` says that requests arrive while the engine runs, and may continue earlier answers.
        Pages are then allocated for `max_num_seqs` rows, instead of for the requests present at the
        start, and pages of answers are cached like those of prompts.
        """
        if not policy.is_packed:
            why = "the model was loaded with its own attention, which this engine cannot use"
            raise UserError("actor_rollout_ref.rollout.name", "native", why, "set it to hf")
        self._policy = policy
        self._limit, self._most_rows = max_model_len, max_num_seqs
        self._tokens_at_once = max_num_batched_tokens
        self._utilization = gpu_memory_utilization
        self._decode, self._most_pages, self._is_open = decode, most_pages, is_open
        self._shape = cache_shape(policy)
        self._steps = DecodeGraphs(policy, heads=self._shape.heads, is_eager=enforce_eager)
        self._reader = PromptReader(
            policy,
            tokens_at_once=max_num_batched_tokens,
            pages=pages_of(max_model_len),
            is_eager=enforce_eager,
        )
        self._guard = WeightGuard(policy) if enable_prefix_caching else None
        self._counts = CacheCounts(PAGE)
        self._scheduler = PagedScheduler(
            PagePool(0), rows=max_num_seqs, tokens=max_num_batched_tokens
        )
        self._rounds: deque[DecodeRound] = deque()
        self._known: dict[tuple[str, int], Row] = {}
        """Rows that wait or run, by request and sample."""
        self._cache: KeyValues | None = None
        self._state: RowState | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or unread."""
        scheduler = self._scheduler
        return not (
            scheduler.waiting or self._rounds or any(not s.is_over for s in scheduler.running)
        )

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a completion does not depend on the other sequences in the batch."""
        return self._policy.is_exact

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        refuse_impossible(request, vocabulary=self._policy.head.vocabulary)
        prompt, new = len(request.tokens), request.sampling.max_new_tokens
        if prompt + new > self._limit:
            raise UserError(
                f"request {request.id}",
                f"{prompt} + {new} tokens",
                f"the engine takes sequences of at most {self._limit} tokens (max_model_len)",
                "shorten the prompt, or raise max_model_len",
            )
        rows = [Row(request, i) for i in range(len(request.keys))]
        self._known |= {(request.id, row.sample): row for row in rows}
        self._scheduler.waiting += rows

    @torch.no_grad()
    def advance(self) -> list[Completion]:
        """Launch what can be launched, and read the results of everything before the last round."""
        launched = len(self._rounds)
        self._drop_if_stale()
        # All prompts that fit are prefilled before decoding: steps of few rows are wasteful.
        is_due = self._scheduler.is_admission_due(is_captured=self._reader.is_captured)
        while is_due and self._admit():
            pass
        finished: list[Completion] = []
        is_constrained = any(
            s.row.constraint is not None for s in self._scheduler.running if not s.is_over
        )
        if is_constrained:
            # What a constraint allows next depends on every token so far.
            finished += self._collect_rounds(unread=0)
        if any(not sequence.is_over for sequence in self._scheduler.running):
            self._launch_round(1 if is_constrained else ROUND)
        # One round stays unread while the device works on it; without a new one, none does.
        unread = 1 if len(self._rounds) > launched and not is_constrained else 0
        return finished + self._collect_rounds(unread=unread)

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; its partial completions.

        Completions of other requests that finish while rounds are read are returned too.
        """
        finished = self._collect_rounds(unread=0)
        scheduler = self._scheduler
        rows = [row for row in scheduler.waiting if row.matches(request, sample)]
        scheduler.waiting = deque(
            row for row in scheduler.waiting if not row.matches(request, sample)
        )
        for sequence in scheduler.running:
            if not sequence.is_over and sequence.row.matches(request, sample):
                rows.append(sequence.row)
                scheduler.end(sequence)
        self._compact()
        return [*finished, *(self._completion(row, "aborted") for row in rows)]

    def snapshot(self, request: str, sample: int, *, start: int = 0) -> TokenStream | None:
        """Tokens from number `start` on of a sample that waits or runs; None: it does neither.

        Those of a round that is not read yet are missing.
        """
        row = self._known.get((request, sample))
        return None if row is None else row.stream(start)

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the policy's parameters, which are shared."""
        return Fingerprint.of(self._policy)

    def drop_prefixes(self) -> None:
        """Cache nothing of earlier prompts and answers any more; requests go on."""
        if self._scheduler.pool.cached:
            self._counts.count(drops=1)
        self._scheduler.pool.drop_cached()

    def cache_stats(self) -> CacheStats:
        """What the prefix cache did so far."""
        if self._guard is None:
            return CacheStats()
        return self._counts.stats(blocks=self._scheduler.pool.cached)

    def close(self) -> None:
        """Drop all requests and free pages and graphs."""
        self.drop_prefixes()
        self._rounds.clear()
        self._known.clear()
        self._clear_graphs()
        self._cache, self._state = None, None
        self._scheduler = PagedScheduler(
            PagePool(0), rows=self._most_rows, tokens=self._tokens_at_once
        )

    def _drop_if_stale(self) -> None:
        """Before a pass: drop cached pages that were filled with other weights."""
        if self._guard is None:
            return
        is_idle = not self._rounds and all(s.is_over for s in self._scheduler.running)
        if self._guard.renew(is_idle=is_idle, is_kept=self._scheduler.pool.cached > 0):
            self.drop_prefixes()

    def _keep(self, tokens: tuple[int, ...], pages: list[int]) -> None:
        """Cache the full pages of these tokens."""
        if self._guard is not None:
            self._guard.keep()
            self._scheduler.pool.keep(tokens, pages)

    def _admit(self) -> bool:
        """Prefill waiting prompts that fit; False when there are none."""
        if not self._scheduler.waiting:
            return False
        self._allocate()
        groups = self._scheduler.admit()
        if groups:
            self._compact()
            self._prefill(groups)
        return bool(groups)

    def _allocate(self) -> None:
        """When nothing runs: allocate pages and rows for the waiting requests, within memory."""
        scheduler = self._scheduler
        if self._rounds or any(not sequence.is_over for sequence in scheduler.running):
            return
        self._compact()
        waiting = list(scheduler.waiting)
        need = max(pages_of(row.limit) for row in waiting) + 1
        wanted = max(page_demand(waiting[: self._most_rows]), need)
        if self._is_open:
            wanted = max(wanted, self._most_rows * (pages_of(self._limit) + 1))
        size = min(wanted, self._affordable())
        if self._cache is None or size > scheduler.pool.size:
            self._refuse_small_pool(size, need)
            self._cache = None
            self._clear_graphs()
            self.drop_prefixes()
            scheduler.pool = PagePool(size, self._counts)
            self._cache = KeyValues(self._shape, size, device=self._policy.device)
        self._refuse_small_pool(scheduler.pool.size, need)
        if self._state is None:
            self._state = RowState(
                self._most_rows,
                pages_of(self._limit),
                _STOPS,
                heads=self._shape.heads,
                device=self._policy.device,
            )
        self._steps.prepare(self._cache, self._state)
        self._reader.prepare(self._cache)

    def _clear_graphs(self) -> None:
        self._steps.clear()
        self._reader.clear()

    def _affordable(self) -> int:
        """Pages that fit into memory, the current ones included."""
        allocated = self._scheduler.pool.size if self._cache is not None else 0
        pages = self._most_pages or affordable_pages(
            self._policy, self._shape, utilization=self._utilization, allocated=allocated
        )
        # Ranks that share a model make the same plans.
        return self._policy.least(pages)

    def _refuse_small_pool(self, pages: int, need: int) -> None:
        if pages < need:
            raise UserError(
                "actor_rollout_ref.rollout.gpu_memory_utilization",
                self._utilization,
                f"there is room for {pages} pages of {PAGE} tokens, and the longest sequence "
                f"needs {need}",
                "raise it, lower max_model_len or the lengths of prompts and answers",
            )

    def _compact(self) -> None:
        """Remove finished rows from the device's tensors."""
        if self._state is None:
            return
        if any(sequence.is_over for sequence in self._scheduler.running):
            self._state.reorder(self._scheduler.compact())
            self._arrange()

    def _arrange(self) -> None:
        """Update the groups of rows that share pages, unless exactness forbids using them."""
        assert self._state is not None
        shape = self._shape
        sequences = [] if self._policy.is_exact else self._scheduler.running
        self._state.groups.arrange(sequences, key_bytes=shape.page_bytes // (PAGE * shape.layers))

    def _prefill(self, groups: list[AdmittedGroup]) -> None:
        """Prefill the prompts, fork their pages, and sample the first token of every row."""
        state, cache, pool = self._state, self._cache, self._scheduler.pool
        assert state is not None
        assert cache is not None
        first = len(self._scheduler.running)
        tokens = [prefix_tokens(group.rows[0]) for group in groups]
        prompts = [
            [*group.cached, *pool.take(pages_of(group.length) - len(group.cached))]
            for group in groups
        ]
        hidden = self._reader.read(cache, tokens, prompts, [group.known for group in groups])
        for group, prefix, pages in zip(groups, tokens, prompts, strict=True):
            self._counts.count(tokens=group.length, reused_tokens=group.known)
            if self._is_open or self._scheduler.waiting:
                self._keep(prefix, pages)
        fresh, copies = self._scheduler.take(groups, prompts)
        cache.copy(copies)
        state.place(first, fresh)
        self._arrange()
        sizes = sent([len(group.rows) for group in groups], hidden.device)
        here = slice(first, first + len(fresh))
        needs = self._prepare_step()
        state.tick.zero_()
        sampled = sample_next(
            self._policy.head,
            hidden.repeat_interleave(sizes, 0, output_size=len(fresh)),
            state,
            here,
            needs,
        )
        state.accept(here, sampled, is_cached=False)
        self._rounds.append(fetch_round(state, fresh, here, 1, needs))

    def _launch_round(self, steps: int) -> None:
        """Launch a round of at most `steps` decode steps for every row."""
        assert self._state is not None
        assert self._cache is not None
        left = [s.row.limit - 1 - s.planned for s in self._scheduler.running if not s.is_over]
        count = min(steps, max(left))
        if count <= 0:
            return
        self._state.set_pages(self._scheduler.grow(count))
        alive = sum(not sequence.is_over for sequence in self._scheduler.running)
        if alive == 0:
            return
        if self._must_compact(alive):
            self._compact()
        needs = self._prepare_step()
        self._state.tick.zero_()
        sequences = list(self._scheduler.running)
        lengths = [0 if sequence.is_over else sequence.planned for sequence in sequences]
        self._steps.run(self._cache, self._state, lengths, count, needs)
        here = slice(0, len(sequences))
        self._rounds.append(fetch_round(self._state, sequences, here, count, needs))
        self._scheduler.count_round()

    def _prepare_step(self) -> StepNeeds:
        """What the next step needs; what constraints allow is written for it."""
        running = self._scheduler.running
        needs = StepNeeds.of(running)
        if needs.is_constrained:
            assert self._state is not None
            masks = [
                (place, sequence.row.allowed)
                for place, sequence in enumerate(running)
                if not sequence.is_over and sequence.row.allowed is not None
            ]
            self._state.allow(masks, vocabulary=self._policy.head.vocabulary)
        return needs

    def _must_compact(self, alive: int) -> bool:
        """Whether a smaller graph would do, or a row that was evicted is still active."""
        most = self._state.rows if self._state is not None else alive
        is_smaller = bucket(alive, most) < bucket(len(self._scheduler.running), most)
        return is_smaller or any(sequence.is_evicted for sequence in self._scheduler.running)

    def _collect_rounds(self, *, unread: int) -> list[Completion]:
        """Read rounds until so many are left; the completions that they finished."""
        finished: list[Completion] = []
        while len(self._rounds) > unread:
            finished += self._collect(self._rounds.popleft())
        return finished

    def _collect(self, round_: DecodeRound) -> list[Completion]:
        """Read a round, and free the pages of rows that ended."""
        finished: list[Completion] = []
        for sequence, reason in round_.read(self._decode):
            finished.append(self._completion(sequence.row, reason))
            self._end(sequence)
        return finished

    def _completion(self, row: Row, reason: Ending) -> Completion:
        """The completion of a row, which is forgotten."""
        self._known.pop((row.request.id, row.sample), None)
        return row.completion(reason)

    def _end(self, sequence: RunningSequence) -> None:
        """Free the pages of an ended row; deactivate it if only the host could see its end."""
        if self._is_open and self._guard is not None and not self._guard.is_mixed:
            # The newest token has no keys yet.
            self._keep(prefix_tokens(sequence.row)[:-1], sequence.pages)
        self._scheduler.end(sequence)
        sampling, is_constrained = (
            sequence.row.request.sampling,
            sequence.row.constraint is not None,
        )
        if is_constrained or sampling.stop_strings or len(sampling.stop_ids) > _STOPS:
            assert self._state is not None
            self._state.active[self._scheduler.running.index(sequence)] = False
