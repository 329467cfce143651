"""Laws of the prefix cache: it knows what was inserted, never leaks a page, changes no answer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base import process_setup
from luyen.base.seeds import derive_key
from luyen.rollout.native.paged.kv_cache import PagePool
from luyen.rollout.native.prefix_cache import PrefixTree
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling
from tests.generation import native, paged, prompt
from tests.tiny_models import tiny_policy

TOKENS = st.lists(st.integers(0, 1), max_size=9)
ACTS = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "evict", "tick"]), TOKENS), max_size=40
)


@given(acts=ACTS, size=st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_a_tree_is_the_set_of_prefixes_that_were_inserted_and_not_evicted(acts, size: int):
    """Against a list of prefixes in the order of their use, the longest unused first."""
    tree = PrefixTree(size)
    known: dict[tuple[int, ...], int] = {}
    used: dict[tuple[int, ...], int] = {}
    order: list[tuple[int, ...]] = []
    clock = fresh = 0

    def mark(path: Sequence[tuple[int, ...]]) -> None:
        for one in reversed(path):
            used[one] = clock
            if one in order:
                order.remove(one)
            order.append(one)

    for act, tokens in acts:
        prefixes = [tuple(tokens[:n]) for n in range(size, len(tokens) + 1, size)]
        path = []
        for one in prefixes:
            if one not in known:
                break
            path.append(one)
        if act == "tick":
            tree.tick()
            clock += 1
        elif act == "match":
            assert tree.match(tokens) == [known[one] for one in path]
            mark(path)
        elif act == "insert":
            added = tree.insert(tokens, fresh.__add__)
            assert added == [(i, fresh + i) for i in range(len(path), len(prefixes))]
            known |= {prefixes[i]: block for i, block in added}
            mark(prefixes)
            fresh += 100
        else:
            may_go = [one for one in order[:1] if used[one] < clock]
            assert tree.evict() == (known.pop(may_go[0]) if may_go else None)
            order = [one for one in order if one in known]
        assert len(tree) == len(known)
    assert sorted(tree.clear()) == sorted(known.values())
    assert tree.match((0, 0, 0, 0)) == []


@given(data=st.data(), size=st.integers(3, 12))
@settings(max_examples=150, deadline=None)
def test_a_page_has_one_content_and_none_is_lost(data: st.DataObject, size: int):
    """Sequences come, grow, share, are cached and go; every page is in use, cached or free."""
    pool = PagePool(size)
    contents: dict[int, tuple[int, ...]] = {}
    running: list[tuple[tuple[int, ...], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["begin", "end", "keep", "drop"]))
        if act == "begin":
            blocks = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
            tokens = tuple(t for block in blocks for t in (block,) * 64)
            cached = pool.match((*tokens, 0))
            for place, page in enumerate(cached):
                assert contents[page] == tokens[: 64 * (place + 1)]
            if len(tokens) // 64 - len(cached) > pool.free:
                pool.drop(cached)
                continue
            taken = pool.take(len(tokens) // 64 - len(cached))
            pages = [*cached, *taken]
            for place in range(len(cached), len(pages)):
                contents[pages[place]] = tokens[: 64 * (place + 1)]
            assert not set(taken) & {p for _, some in running for p in some}
            running.append((tokens, pages))
        elif act == "drop":
            pool.drop_cached()
            assert pool.cached == 0
        elif running:
            index = data.draw(st.integers(0, len(running) - 1))
            tokens, pages = running[index]
            pool.keep(tokens, pages)
            if act == "end":
                pool.drop(pages)
                running.pop(index)
        in_use = {page for _, some in running for page in some}
        assert pool.free == size - len(in_use)
    for _, pages in running:
        pool.drop(pages)
    assert sorted(pool.take(size)) == list(range(size))


POLICY = tiny_policy("qwen2", initializer_range=0.15)


def said(tree: list[tuple[int, int, int]], engine: RolloutEngine) -> dict[str, Completion]:
    """Answers of a tree of turns: (an earlier turn to continue, or -1; new tokens; to generate)."""
    turns: list[Request] = []
    found: dict[str, Completion] = {}
    for number, (before, length, new) in enumerate(tree):
        tokens = prompt(length, seed=number % 3)
        if 0 <= before < number:
            parent = turns[before]
            tokens = (*parent.tokens, *found[parent.id].tokens, *tokens)
        asked = Request(
            id=f"turn{number}",
            tokens=tokens[:200],
            keys=(derive_key(0, "law", number),),
            sampling=Sampling(max_new_tokens=new),
        )
        turns.append(asked)
        engine.submit(asked)
        while not engine.is_idle:
            found |= {done.request: done for done in engine.advance()}
    # All at once, and in another order: company and cache together change nothing either.
    for asked in reversed(turns):
        engine.submit(replace(asked, id=f"{asked.id} again"))
    while not engine.is_idle:
        found |= {done.request: done for done in engine.advance()}
    return found


TREES = st.lists(
    st.tuples(st.integers(-1, 6), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8
)


@pytest.mark.skipif(not process_setup.is_promised("float32"), reason="no exactness on this machine")
@given(
    tree=TREES,
    rows=st.integers(1, 5),
    tokens=st.integers(200, 500),
    room=st.sampled_from([0, 1 << 14, 1 << 16, 1 << 24]),
    is_open=st.booleans(),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_no_bit_of_any_tree_of_conversations_depends_on_the_cache(
    tree, rows: int, tokens: int, room: int, is_open: bool
):
    limits = {"rows": rows, "tokens": tokens, "longest": 256}
    cached = native(POLICY, **limits, is_open=is_open, **host_limit(room))
    plain = native(POLICY, **limits, enable_prefix_caching=False)
    assert said(tree, cached) == said(tree, plain)
    if POLICY.device.type == "cpu":
        assert cached.cache_stats().blocks * 8 * 2 * 2 * 2 * 16 * 4 <= room


def host_limit(room: int) -> dict[str, int]:
    """The limit of the cache in host memory; that of pages is their number."""
    return {"prefix_bytes": room} if POLICY.device.type == "cpu" else {}


@given(tree=TREES, rows=st.integers(1, 5), pages=st.integers(5, 30), is_open=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
@torch.no_grad()
def test_no_answer_of_any_tree_depends_on_cached_pages(tree, rows: int, pages: int, is_open: bool):
    cached = paged(POLICY, rows=rows, pages=pages, longest=256, is_open=is_open)
    plain = paged(POLICY, rows=rows, longest=256, enable_prefix_caching=False)
    ours, theirs = said(tree, cached), said(tree, plain)
    assert {name: done.tokens for name, done in ours.items()} == {
        name: done.tokens for name, done in theirs.items()
    }
    is_exact = POLICY.device.type == "cuda"
    for name, done in ours.items():
        logps = theirs[name].logps
        assert done.logps == (logps if is_exact else pytest.approx(logps, abs=2e-5))
    pool = cached._scheduler.pool
    assert pool.free == pool.size
