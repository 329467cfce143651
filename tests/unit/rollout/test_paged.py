"""The paged engine: the same answers as the slotted one, whatever pages and rows there are."""

from dataclasses import replace

import pytest
import torch

from luyen.base.errors import UserError
from luyen.rollout.native.paged.kv_cache import PagePool
from luyen.rollout.protocol import Completion, Request, generate
from tests.generation import Ladder, native, paged, request
from tests.tiny_models import VOCABULARY, tiny_policy


def mixed() -> list[Request]:
    return [
        request(5, 70, name="a", samples=4),
        request(64, 30, name="b", samples=3),
        request(130, 9, name="c", samples=1, temperature=0.7),
        request(63, 100, name="d", samples=2, stop_ids=frozenset({7, 9, 11})),
        request(17, 40, name="e", samples=2, temperature=0.0),
        request(1, 1, name="f", samples=2),
        request(40, 60, name="g", samples=2, stop_strings=("bc", "xk", "pp", "ma")),
    ]


def same(one: dict[tuple[str, int], Completion], other: dict[tuple[str, int], Completion]) -> None:
    assert one.keys() == other.keys()
    for name, done in one.items():
        assert done.tokens == other[name].tokens, name
        assert done.reason == other[name].reason
        assert done.logps == pytest.approx(other[name].logps, abs=2e-5)


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    return tiny_policy("llama")


def test_it_answers_as_the_slotted_engine(policy):
    same(generate(paged(policy, rows=16), mixed()), generate(native(policy), mixed()))


@pytest.mark.parametrize("limits", [{"rows": 3}, {"tokens": 50}, {"rows": 1, "tokens": 7}])
def test_limits_change_nothing(policy, limits):
    same(generate(paged(policy, **limits), mixed()), generate(paged(policy, rows=16), mixed()))


def test_rows_that_run_out_of_pages_wait_and_go_on_where_they_were(policy):
    asked = [request(60, 120, name=f"r{i}", samples=3) for i in range(3)]
    engine = paged(policy, rows=16, pages=9)
    evicted = []
    engine._scheduler._evict = _noting(engine._scheduler._evict, evicted)
    small = generate(engine, asked)
    assert evicted
    same(small, generate(native(policy), asked))
    assert engine._scheduler.pool.free == engine._scheduler.pool.size == 9


def _noting(act, noted):
    def noting(seat):
        noted.append(seat)
        act(seat)

    return noting


def test_a_sequence_that_can_never_fit_is_refused(policy):
    engine = paged(policy, pages=2, longest=400)
    engine.submit(request(100, 100))
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        engine.advance()
    with pytest.raises(UserError, match="max_model_len"):
        engine.submit(request(300, 200))


def test_truncated_rows_tell_what_mass_was_kept(policy):
    asked = [request(9, 12, name="t", samples=3, top_k=5, top_p=0.8), request(5, 8, name="u")]
    ours, theirs = generate(paged(policy, rows=16), asked), generate(native(policy), asked)
    same(ours, theirs)
    for name, done in ours.items():
        assert done.kept_mass == pytest.approx(theirs[name].kept_mass, abs=1e-5)


def ruled() -> list[Request]:
    """Constrained requests, and some that report the likeliest tokens, among plain ones."""
    rules = {"b": Ladder(VOCABULARY, steps=200), "d": Ladder(VOCABULARY), "g": Ladder(VOCABULARY)}
    tops = {"a": 3, "d": 20, "e": 7}
    return [
        replace(
            one,
            constraint=rules.get(one.id),
            sampling=replace(one.sampling, top_logprobs=tops.get(one.id, 0)),
        )
        for one in mixed()
    ]


@pytest.mark.parametrize("limits", [{"rows": 16}, {"rows": 3}, {"rows": 16, "pages": 9}])
def test_constrained_rows_and_alternatives_are_those_of_the_slotted_engine(policy, limits):
    engine = paged(policy, **limits)
    ours, theirs = generate(engine, ruled()), generate(native(policy), ruled())
    same(ours, theirs)
    for name, done in ours.items():
        assert done.kept_mass == pytest.approx(theirs[name].kept_mass, abs=1e-5)
        assert len(done.top_logps) == len(theirs[name].top_logps)
        for one, other in zip(done.top_logps, theirs[name].top_logps, strict=True):
            assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=2e-5)
    plain = generate(engine, mixed())
    for name in (("c", 0), ("f", 0), ("f", 1), ("a", 2)):
        assert (ours[name].tokens, ours[name].logps) == (plain[name].tokens, plain[name].logps)
    assert engine._scheduler.pool.free == engine._scheduler.pool.size


def test_requests_may_come_while_others_run_and_the_engine_is_used_again(policy):
    engine = paged(policy, rows=4)
    alone = generate(native(policy), mixed())
    for _ in range(2):
        found: dict[tuple[str, int], Completion] = {}
        waiting = mixed()
        while waiting or not engine.is_idle:
            if waiting:
                engine.submit(waiting.pop())
            found.update({(c.request, c.sample): c for c in engine.advance()})
        same(dict(sorted(found.items())), alone)
        assert engine._scheduler.pool.free == engine._scheduler.pool.size


def test_an_aborted_request_gives_what_there_is(policy):
    engine = paged(policy, rows=16)
    for asked in (request(5, 200, name="long", samples=2), request(6, 20, name="short")):
        engine.submit(asked)
    found = [c for _ in range(3) for c in engine.advance()]
    found += engine.abort("long")
    stopped = [c for c in found if c.request == "long"]
    assert [c.reason for c in stopped] == ["aborted", "aborted"]
    assert all(0 < len(c.tokens) < 200 for c in stopped)
    while not engine.is_idle:
        found += engine.advance()
    whole = generate(native(policy), [request(6, 20, name="short")])
    assert [c.tokens for c in found if c.request == "short"] == [whole["short", 0].tokens]
    assert engine._scheduler.pool.free == engine._scheduler.pool.size


def test_a_request_can_be_aborted_before_anything_ran(policy):
    engine = paged(policy)
    engine.submit(request(5, 8, name="early", samples=2))
    assert [c.reason for c in engine.abort("early")] == ["aborted", "aborted"]
    assert engine.is_idle


def test_the_host_is_never_more_than_a_round_behind(policy):
    stops = frozenset(range(3, 30))
    asked = [request(5, 60, name=f"r{i:02d}", samples=1, stop_ids=stops) for i in range(40)]
    engine = paged(policy, rows=4)
    for one in asked:
        engine.submit(one)
    found = {}
    calls = 0
    while not engine.is_idle:
        found.update({(c.request, c.sample): c for c in engine.advance()})
        assert len(engine._rounds) <= 1
        calls += 1
    same(dict(sorted(found.items())), generate(native(policy), asked))
    # Answers stop after a few tokens: a round or two for each wave of four, not sixty tokens.
    assert calls < 45


def test_a_pool_that_memory_bounds_is_made_once(policy):
    engine = paged(policy, rows=16, pages=9)
    asked = [request(60, 120, name=f"r{i}", samples=3) for i in range(3)]
    generate(engine, asked)
    pool, cache = engine._scheduler.pool, engine._cache
    generate(engine, asked)
    assert engine._scheduler.pool is pool
    assert engine._cache is cache


def test_conversations_go_on_while_others_run_in_a_pool_that_is_made_once(policy):
    engine = paged(policy, rows=6, pages=60, longest=300, is_open=True)
    talks = {f"t{i}": [request(9 + 20 * i, 12, name=f"t{i}")] for i in range(5)}
    engine.submit(talks["t0"][0])
    found = {}
    pools = set()
    waiting = [talk[0] for talk in talks.values()][1:]
    while waiting or not engine.is_idle:
        if waiting:
            engine.submit(waiting.pop())
        for done in engine.advance():
            found[done.request, done.sample] = done
            talk = talks[done.request.partition("+")[0]]
            if len(talk) < 3:
                talk.append(_answered(talk[-1], done))
                engine.submit(talk[-1])
        pools.add(engine._scheduler.pool.size)
    assert len(found) == 15
    # Six rows of 300 tokens and a page more each would be 36 pages: memory allows them.
    assert pools == {36}
    asked = [one for talk in talks.values() for one in talk]
    same(dict(sorted(found.items())), generate(native(policy), asked))
    assert engine._scheduler.pool.free == 36


def _answered(asked: Request, done: Completion) -> Request:
    """The next turn: all that was said, and a little more."""
    return replace(
        asked, id=f"{asked.id}+", tokens=(*asked.tokens, *done.tokens, 5, 6, 7), keys=asked.keys
    )


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral", "qwen3"])
def test_windows_caps_and_sinks(name):
    policy = tiny_policy(name)
    asked = [request(90, 20, name="a", samples=2), request(7, 60, name="b")]
    same(generate(paged(policy, rows=16), asked), generate(native(policy), asked))


def test_a_page_is_free_when_its_last_holder_dropped_it():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.drop(pages)
    assert pool.free == 2
    pool.drop(pages[:1])
    assert pool.free == 3
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_prompts_that_arrive_while_many_rows_run_are_read_together(policy):
    """Reading prompts stalls all rows, so they are collected; few rows are stalled at once."""
    first = [request(3, 12 + 9 * (i % 5), name=f"r{i}") for i in range(64)]
    later = [request(4, 10, name=f"s{i}") for i in range(12)]

    def passes(count: int) -> list[int]:
        """How many prompts each pass read while one prompt arrives with every round."""
        engine = paged(policy, rows=80)
        sizes: list[int] = []
        prefill = engine._prefill
        engine._prefill = lambda groups: (sizes.append(len(groups)), prefill(groups))
        for one in first[:count]:
            engine.submit(one)
        waiting, found = list(later), {}
        while waiting or not engine.is_idle:
            found |= {(done.request, done.sample): done for done in engine.advance()}
            if waiting:
                engine.submit(waiting.pop(0))
        same(found, generate(native(policy), [*first[:count], *later]))
        return sizes

    assert max(passes(64)[1:]) > 1
    assert max(passes(8)[1:]) == 1
