"""Continuous batching on a GPU, one round of decode steps ahead of the host.

While the device draws the tokens of a round, the host reads those of the round before: it looks
for stop strings, frees pages and lets waiting requests in. A row whose stop token came up rests on
the device at once. What a row gets depends on its own tokens and key only.
"""

from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.paged import PAGE, Chunks
from luyen.models.policy import Policy
from luyen.rollout.native.paged.context import ReadContext
from luyen.rollout.native.paged.graphs import Steps, bucket
from luyen.rollout.native.paged.pages import PagePool, pages_of
from luyen.rollout.native.paged.pool import KeyValues, affordable_pages, cache_shape
from luyen.rollout.native.paged.seats import (
    Seat,
    Seats,
    demand,
    forked,
    known_length,
    known_tokens,
)
from luyen.rollout.native.paged.state import ROUND, RowState
from luyen.rollout.native.paged.step import draw_rows
from luyen.rollout.native.running import Decode, Row
from luyen.rollout.protocol import Completion, Request, refuse_impossible

_STOPS = 8
"""Stop tokens of a row that the device knows; the host sees all of them, a round later."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Round:
    """Draws that were launched and have not been read.

    Example:
        Made by `PagedEngine` for every round of decode steps.
    """

    seats: list[Seat]
    """Whose they are, by column."""
    tokens: Tensor
    """`[steps, rows]` on the host once `ready`."""
    logps: Tensor
    """Their log-probabilities."""
    kept: Tensor | None
    """Mass that truncation left, if any row truncates."""
    ready: torch.cuda.Event | None
    """When the device has written them; None: they are there."""


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
    ) -> None:
        """`decode` turns tokens into text, for stop strings; `most_pages` caps the pool."""
        if not policy.is_packed:
            why = "the model was loaded with its own attention, which this engine cannot use"
            raise UserError("actor_rollout_ref.rollout.name", "native", why, "set it to hf")
        self._policy = policy
        self._limit = max_model_len
        self._most_rows = max_num_seqs
        self._tokens_at_once = max_num_batched_tokens
        self._utilization = gpu_memory_utilization
        self._decode = decode
        self._most_pages = most_pages
        self._shape = cache_shape(policy)
        self._steps = Steps(policy, heads=self._shape.heads, is_eager=enforce_eager)
        self._seats = Seats(PagePool(0), rows=max_num_seqs, tokens=max_num_batched_tokens)
        self._rounds: deque[_Round] = deque()
        self._cache: KeyValues | None = None
        self._state: RowState | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or unread."""
        seats = self._seats
        return not (seats.waiting or self._rounds or any(not s.is_over for s in seats.running))

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
        self._seats.waiting += [Row(request, i) for i in range(len(request.keys))]

    @torch.no_grad()
    def advance(self) -> list[Completion]:
        """Launch what can be launched, and read the results of the round before."""
        launched = len(self._rounds)
        if self._seats.waiting:
            self._make_room()
            groups = self._seats.admit()
            if groups:
                self._compact()
                self._read_prompts(groups)
        if any(not seat.is_over for seat in self._seats.running):
            self._draw()
        if launched or len(self._rounds) > 1 or not self._seats.running:
            return self._collect(self._rounds.popleft()) if self._rounds else []
        return []

    def abort(self, request: str) -> list[Completion]:
        """Stop a request, and give what there is of its unfinished answers."""
        finished: list[Completion] = []
        while self._rounds:
            finished += self._collect(self._rounds.popleft())
        seats = self._seats
        rows = [row for row in seats.waiting if row.request.id == request]
        seats.waiting = deque(row for row in seats.waiting if row.request.id != request)
        for seat in seats.running:
            if not seat.is_over and seat.row.request.id == request:
                rows.append(seat.row)
                seats.end(seat)
        self._compact()
        return [*finished, *(row.completion("aborted") for row in rows)]

    def close(self) -> None:
        """Free what is held."""
        self._rounds.clear()
        self._steps.clear()
        self._cache, self._state = None, None
        self._seats = Seats(PagePool(0), rows=self._most_rows, tokens=self._tokens_at_once)

    def _make_room(self) -> None:
        """When nothing runs: pages and rows for what waits, as far as memory goes."""
        seats = self._seats
        if self._rounds or any(not seat.is_over for seat in seats.running):
            return
        if self._state is not None:
            self._compact()
        waiting = list(seats.waiting)
        need = max(pages_of(row.limit) for row in waiting) + 1
        wanted = max(demand(waiting[: self._most_rows]), need)
        if self._cache is None or wanted > seats.pool.size:
            self._cache = None
            self._steps.clear()
            cap = self._most_pages or affordable_pages(
                self._shape, device=self._policy.device, utilization=self._utilization
            )
            self._refuse_small_pool(cap, need)
            seats.pool = PagePool(min(wanted, cap))
            self._cache = KeyValues(self._shape, seats.pool.size, device=self._policy.device)
        self._refuse_small_pool(seats.pool.size, need)
        if self._state is None:
            self._state = RowState(
                self._most_rows, pages_of(self._limit), _STOPS, device=self._policy.device
            )
        self._steps.prepare(self._cache, self._state)

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
        """Take rows that are over out of the device's tensors."""
        assert self._state is not None
        if any(seat.is_over for seat in self._seats.running):
            self._state.reorder(self._seats.compact())

    def _read_prompts(self, groups: list[list[Row]]) -> None:
        """Read the prompts, fork their pages, and draw the first token of every row."""
        state, cache, pool = self._state, self._cache, self._seats.pool
        assert state is not None
        assert cache is not None
        first = len(self._seats.running)
        rows: list[Row] = []
        lengths: list[int] = []
        tables: list[list[int]] = []
        copies: list[tuple[int, int]] = []
        prompts = [pool.take(pages_of(known_length(group[0]))) for group in groups]
        hidden = self._read([group[0] for group in groups], prompts)
        for group, pages in zip(groups, prompts, strict=True):
            length = known_length(group[0])
            own, needed = forked(pool, pages, length, len(group))
            copies += needed
            tables += own
            rows += group
            lengths += [length] * len(group)
        cache.copy([source for source, _ in copies], [target for _, target in copies])
        state.place(first, rows, lengths, tables)
        sizes = torch.tensor([len(group) for group in groups]).to(hidden.device)
        seats = [
            Seat(row, pages, length)
            for row, pages, length in zip(rows, tables, lengths, strict=True)
        ]
        self._seats.running += seats
        here = slice(first, first + len(rows))
        is_truncated = self._is_truncated()
        state.tick.zero_()
        drawn = draw_rows(
            self._policy.head,
            hidden.repeat_interleave(sizes, 0, output_size=len(rows)),
            state,
            here,
            is_truncated=is_truncated,
        )
        state.accept(here, drawn.tokens, drawn.logps, drawn.kept)
        self._launched(seats, here, 1, is_truncated)

    def _read(self, rows: list[Row], pages: list[list[int]]) -> Tensor:
        """Last hidden state of each row's tokens so far, in passes within the token budget."""
        last: list[Tensor] = [torch.empty(0)] * len(rows)
        done = [0] * len(rows)
        while any(done[i] < known_length(row) for i, row in enumerate(rows)):
            budget = self._tokens_at_once
            part: list[tuple[int, int]] = []
            for index, row in enumerate(rows):
                count = min(known_length(row) - done[index], budget)
                if count > 0:
                    part.append((index, count))
                    budget -= count
            hidden = self._read_pass(rows, pages, part, done)
            end = 0
            for index, count in part:
                end += count
                done[index] += count
                last[index] = hidden[end - 1]
        return torch.stack(last)

    def _read_pass(
        self, rows: list[Row], pages: list[list[int]], part: list[tuple[int, int]], done: list[int]
    ) -> Tensor:
        assert self._cache is not None
        device = self._policy.device
        widest = max(len(pages[index]) for index, _ in part)
        tables = [pages[index] + [0] * (widest - len(pages[index])) for index, _ in part]
        tokens: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for index, count in part:
            begin = done[index]
            tokens += known_tokens(rows[index])[begin : begin + count]
            for place in range(begin, begin + count):
                places.append(place)
                slots.append(pages[index][place // PAGE] * PAGE + place % PAGE)
        columns = torch.tensor([tokens, places, slots]).to(device)
        context = ReadContext(
            cache=self._cache,
            slots=columns[2],
            tables=torch.tensor(tables, dtype=torch.int32).to(device),
            chunks=Chunks.of(
                [count for _, count in part],
                [done[index] + count for index, count in part],
                device=device,
            ),
        )
        return self._policy.hidden(columns[0], columns[1], context)

    def _draw(self) -> None:
        """Launch a round of decode steps for every row."""
        assert self._state is not None
        assert self._cache is not None
        left = [s.row.limit - 1 - s.planned for s in self._seats.running if not s.is_over]
        count = min(ROUND, max(left))
        if count <= 0:
            return
        self._state.set_pages(self._seats.grow(count))
        alive = sum(not seat.is_over for seat in self._seats.running)
        if alive == 0:
            return
        if self._must_compact(alive):
            self._compact()
        is_truncated = self._is_truncated()
        self._state.tick.zero_()
        rows = len(self._seats.running)
        self._steps.run(self._cache, self._state, rows, count, is_truncated=is_truncated)
        self._launched(list(self._seats.running), slice(0, rows), count, is_truncated)

    def _must_compact(self, alive: int) -> bool:
        """Whether a smaller graph would do, or a row that was evicted is still active."""
        most = self._state.rows if self._state is not None else alive
        is_smaller = bucket(alive, most) < bucket(len(self._seats.running), most)
        return is_smaller or any(seat.is_evicted for seat in self._seats.running)

    def _is_truncated(self) -> bool:
        return any(
            seat.row.request.sampling.is_truncated
            for seat in self._seats.running
            if not seat.is_over
        )

    def _launched(self, seats: list[Seat], here: slice, count: int, is_truncated: bool) -> None:
        """Ask for the results of `count` steps to be brought to the host."""
        state = self._state
        assert state is not None
        outs = [state.out_tokens, state.out_logps, *([state.out_kept] if is_truncated else [])]
        found = [out[:count, here].to("cpu", non_blocking=True) for out in outs]
        ready = None
        if self._policy.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        else:
            found = [tensor.clone() for tensor in found]
        self._rounds.append(
            _Round(
                seats=seats,
                tokens=found[0],
                logps=found[1],
                kept=found[2] if is_truncated else None,
                ready=ready,
            )
        )

    def _collect(self, round_: _Round) -> list[Completion]:
        """Read a round: append its draws to their rows, and end the rows that ended."""
        if round_.ready is not None:
            round_.ready.synchronize()
        tokens, logps = round_.tokens.T.tolist(), round_.logps.T.tolist()
        kept = round_.kept.T.tolist() if round_.kept is not None else None
        finished: list[Completion] = []
        for column, seat in enumerate(round_.seats):
            if seat.is_over:
                continue
            masses = kept[column] if kept is not None else [1.0] * len(tokens[column])
            for token, logp, mass in zip(tokens[column], logps[column], masses, strict=True):
                seat.row.append(token, logp, mass)
                reason = seat.row.ending(self._decode)
                if reason is not None:
                    finished.append(seat.row.completion(reason))
                    self._end(seat)
                    break
        return finished

    def _end(self, seat: Seat) -> None:
        """A row ended: free its pages; the device hears of an end that only the host could see."""
        self._seats.end(seat)
        sampling = seat.row.request.sampling
        if sampling.stop_strings or len(sampling.stop_ids) > _STOPS:
            index = self._seats.running.index(seat)
            assert self._state is not None
            self._state.active[index] = False
