"""Which sequences run and which pages they hold; the newest are preempted when pages run out."""

from collections import deque
from collections.abc import Sequence
from typing import final

from luyen.models.paged_attention import PAGE
from luyen.rollout.native.paged.kv_cache import PagePool, pages_of
from luyen.rollout.native.sequences import Row

ROUND = 8
"""Decode steps per round; the host reads results once a round."""


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
class PagedScheduler:
    """Running sequences in the order of the device's rows, and those that wait for one."""

    def __init__(self, pool: PagePool, *, rows: int, tokens: int) -> None:
        """At most `rows` sequences at once, prompts read in passes of at most `tokens` tokens."""
        self.pool = pool
        self.running: list[RunningSequence] = []
        self.waiting: deque[Row] = deque()
        self._rows = rows
        self._tokens = tokens

    def admit(self) -> list[list[Row]]:
        """Waiting rows that fit now; new rows of one prompt go together."""
        free = self._rows - sum(not sequence.is_over for sequence in self.running)
        pages, budget = self.pool.free - len(self.running), self._tokens
        groups: list[list[Row]] = []
        while self.waiting and free > 0:
            row = self.waiting[0]
            is_sibling = (
                bool(groups)
                and groups[-1][0].request is row.request
                and not row.tokens
                and not groups[-1][0].tokens
            )
            length = prefix_length(row)
            # A sibling needs the page that is copied and the one it grows into.
            need = 2 if is_sibling else pages_of(length) + 1
            if need > pages or (groups and not is_sibling and length > budget):
                break
            if is_sibling:
                groups[-1].append(self.waiting.popleft())
            else:
                groups.append([self.waiting.popleft()])
                budget -= length
            pages -= need
            free -= 1
        return groups

    def take(
        self, groups: Sequence[list[Row]], prompts: Sequence[list[int]]
    ) -> tuple[list[RunningSequence], list[tuple[int, int]]]:
        """Add rows whose prompts are in these pages; (source, target) pages to copy."""
        fresh: list[RunningSequence] = []
        copies: list[tuple[int, int]] = []
        for group, pages in zip(groups, prompts, strict=True):
            length = prefix_length(group[0])
            tables, needed = fork_pages(self.pool, pages, length, len(group))
            copies += needed
            shared = length // PAGE if len(group) > 1 else 0
            fresh += [
                RunningSequence(row, own, length, shared=shared)
                for row, own in zip(group, tables, strict=True)
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
