"""Which sequences run and which pages they hold; the newest are preempted when pages run out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.models.paged_attention import PAGE
from luyen.rollout.native.paged.kv_cache import PagePool, pages_of
from luyen.rollout.native.sequences import Row

ROUND = 8
"""Decode steps per round; the host reads results once a round."""
_ROWS_PER_ROUND, _MOST_ROUNDS = 32, 8
"""Running rows for each round that a waiting prompt is held back, and such rounds at most."""
_CAPTURED_ROWS_PER_ROUND, _CAPTURED_MOST_ROUNDS = 64, 3
"""The same where passes over prompts are captured: they take a fifth of the time of a round."""
_WORTH_TOKENS = 1024
"""Waiting tokens from which on a captured pass gains nothing from more of them."""


@final
class RunningSequence:
    """A running sequence: its row, its pages, and the steps launched for it."""

    __slots__ = ("is_evicted", "is_over", "pages", "planned", "row", "shared")

    def __init__(self, row: Row, pages: list[int], planned: int, *, shared: int = 0) -> None:
        """`planned` counts the tokens that will be cached when all that was launched has run.

        The first `shared` pages are full and shared with samples of the same prompt.
        """
        self.row = row
        self.pages = pages
        self.planned = planned
        self.shared = shared
        self.is_over = False
        self.is_evicted = False

    @property
    def may_truncate(self) -> bool:
        """Whether its row may truncate in the steps that were planned last."""
        sampling = self.row.request.sampling
        begun = self.planned - len(self.row.request.tokens) - ROUND
        is_ruled = sampling.is_filtered or self.row.constraint is not None
        return is_ruled or (bool(sampling.barred_ids) and begun < sampling.min_new_tokens)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdmittedGroup:
    """Rows of one prompt that begin now.

    Example:
        Made by `PagedScheduler.admit`.
    """

    rows: list[Row]
    """Samples of the prompt, or one row that goes on after it was evicted."""
    cached: list[int]
    """Pages of its beginning that are filled already."""

    @property
    def length(self) -> int:
        """Tokens to begin with."""
        return prefix_length(self.rows[0])

    @property
    def known(self) -> int:
        """Tokens in the cached pages."""
        return PAGE * len(self.cached)

    @property
    def fresh(self) -> int:
        """Tokens to read."""
        return self.length - self.known

    def takes(self, row: Row) -> bool:
        """Whether the row is another sample of the same prompt."""
        first = self.rows[0]
        return first.request is row.request and not row.tokens and not first.tokens


@final
class PagedScheduler:
    """Running sequences in the order of the device's rows, and those that wait for one."""

    def __init__(self, pool: PagePool, *, rows: int, tokens: int) -> None:
        """At most `rows` sequences at once, prompts read in passes of at most `tokens` tokens."""
        self.pool = pool
        self.running: list[RunningSequence] = []
        self.waiting: deque[Row] = deque()
        self._rows = rows
        self._tokens = tokens
        self._waited = 0
        """Rounds that a row waits although there is room for one more."""

    def is_admission_due(self, *, is_captured: bool) -> bool:
        """Whether waiting prompts are read now; the more rows run, the longer they are collected.

        A pass that is launched call by call stalls every running row for about the time of a round,
        however few prompts there are. A captured one takes as long as the device needs: prompts
        that fill it are read at once. While few rows run, none waits for company.
        """
        rows, most = _ROWS_PER_ROUND, _MOST_ROUNDS
        if is_captured:
            rows, most = _CAPTURED_ROWS_PER_ROUND, _CAPTURED_MOST_ROUNDS
            if self._waiting_tokens(_WORTH_TOKENS) >= _WORTH_TOKENS:
                return True
        alive = sum(not sequence.is_over for sequence in self.running)
        return self._waited >= min(most, alive // rows)

    def _waiting_tokens(self, enough: int) -> int:
        """Tokens of prompts that wait, as far as there is need to count."""
        total, last = 0, None
        for row in self.waiting:
            if row.request is not last:
                total += prefix_length(row)
            last = row.request
            if total >= enough:
                break
        return total

    def count_round(self) -> None:
        """A round was launched while the rows that wait now were waiting."""
        has_room = self._rows > sum(not sequence.is_over for sequence in self.running)
        self._waited = self._waited + 1 if self.waiting and has_room else 0

    def admit(self) -> list[AdmittedGroup]:
        """Waiting rows that fit now; new rows of one prompt go together.

        They hold the cached pages that their prompts begin with.
        """
        free = self._rows - sum(not sequence.is_over for sequence in self.running)
        promised, budget = len(self.running), self._tokens
        groups: list[AdmittedGroup] = []
        while self.waiting and free > 0:
            row = self.waiting[0]
            if groups and groups[-1].takes(row):
                # A sibling needs the page that is copied and the one it grows into.
                if promised + 2 > self.pool.free:
                    break
                groups[-1].rows.append(self.waiting.popleft())
                promised += 2
            else:
                group = AdmittedGroup(rows=[row], cached=self.pool.match(prefix_tokens(row)))
                need = pages_of(group.length) + 1 - len(group.cached)
                if promised + need > self.pool.free or (groups and group.fresh > budget):
                    self.pool.drop(group.cached)
                    break
                groups.append(group)
                self.waiting.popleft()
                promised += need
                budget -= group.fresh
            free -= 1
        self._waited = 0 if groups else self._waited
        return groups

    def take(
        self, groups: Sequence[AdmittedGroup], prompts: Sequence[list[int]]
    ) -> tuple[list[RunningSequence], list[tuple[int, int]]]:
        """Add rows whose prompts are in these pages; (source, target) pages to copy."""
        fresh: list[RunningSequence] = []
        copies: list[tuple[int, int]] = []
        for group, pages in zip(groups, prompts, strict=True):
            tables, needed = fork_pages(self.pool, pages, group.length, len(group.rows))
            copies += needed
            shared = group.length // PAGE if len(group.rows) > 1 else 0
            fresh += [
                RunningSequence(row, own, group.length, shared=shared)
                for row, own in zip(group.rows, tables, strict=True)
            ]
        self.running += fresh
        return fresh, copies

    def grow(self, steps: int) -> list[tuple[int, int, int]]:
        """Take pages for so many more tokens of every row; (row, place, page) of the new ones.

        When pages run out, the newest rows are evicted and wait; the caller must then remove
        finished sequences from the device's rows (`compact`).
        """
        new: list[tuple[int, int, int]] = []
        for index, sequence in enumerate(self.running):
            if sequence.is_over:
                continue
            goal = max(sequence.planned, min(sequence.planned + steps, sequence.row.limit - 1))
            need = pages_of(goal) - len(sequence.pages)
            if need <= 0:
                sequence.planned = goal
                continue
            while need > self.pool.free and self._evict_after(index):
                pass
            if need > self.pool.free:
                self._evict(sequence)
                continue
            for page in self.pool.take(need):
                new.append((index, len(sequence.pages), page))
                sequence.pages.append(page)
            sequence.planned = goal
        return new

    def end(self, sequence: RunningSequence) -> None:
        """The sequence is finished: its pages are free."""
        sequence.is_over = True
        self.pool.drop(sequence.pages)
        sequence.pages = []

    def compact(self) -> list[int]:
        """Drop finished sequences; the old index of every remaining one, in the new order."""
        kept = [i for i, sequence in enumerate(self.running) if not sequence.is_over]
        self.running = [self.running[i] for i in kept]
        return kept

    def _evict_after(self, index: int) -> bool:
        """Evict the newest running row after `index`; False when there is none."""
        for sequence in reversed(self.running[index + 1 :]):
            if not sequence.is_over:
                self._evict(sequence)
                return True
        return False

    def _evict(self, sequence: RunningSequence) -> None:
        self.end(sequence)
        sequence.is_evicted = True
        self.waiting.appendleft(sequence.row)


def prefix_tokens(row: Row) -> tuple[int, ...]:
    """The prompt and the generated tokens: what an evicted row is prefilled with."""
    return (*row.request.tokens, *row.tokens)


def prefix_length(row: Row) -> int:
    """Number of `prefix_tokens`."""
    return len(row.request.tokens) + len(row.tokens)


def fork_pages(
    pool: PagePool, prompt: list[int], length: int, samples: int
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Pages of each sample of a prompt, and (source, target) of the pages to copy.

    Full pages are shared. The last one, which samples will write into, is copied.

    Example:
        >>> fork_pages(PagePool(3), [7], 10, 2)
        ([[7], [0]], [(7, 0)])
    """
    if length % PAGE == 0:
        for _ in range(samples - 1):
            pool.share(prompt)
        return [list(prompt) for _ in range(samples)], []
    whole, last = prompt[:-1], prompt[-1]
    tables, copies = [list(prompt)], []
    for _ in range(samples - 1):
        pool.share(whole)
        own = pool.take(1)
        tables.append([*whole, *own])
        copies.append((last, own[0]))
    return tables, copies


def page_demand(rows: Sequence[Row]) -> int:
    """Pages that would let all these rows run to their end at once."""
    seen: set[str] = set()
    pages = 0
    for row in rows:
        prompt = len(row.request.tokens)
        shared = prompt // PAGE
        if row.request.id not in seen:
            seen.add(row.request.id)
            pages += shared
        pages += pages_of(row.limit) - shared + 1
    return pages
