"""Rows of a prompt that read its pages together: the same answers, whoever comes and goes."""

from dataclasses import replace

import pytest
import torch

from luyen.models.policy import Policy
from luyen.rollout.native.paged import device_state
from luyen.rollout.native.paged.device_state import (
    RowGroups,
    RowState,
    shared_prefix_groups,
    sharing_pays,
    split_evenly,
)
from luyen.rollout.native.paged.engine import PagedEngine
from luyen.rollout.native.paged.scheduler import RunningSequence
from luyen.rollout.native.sequences import Row
from luyen.rollout.protocol import Completion, Request, generate
from tests.generation import paged, request
from tests.tiny_models import DEVICE, tiny_policy

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares in float64, which kernels lack")
CPU = torch.device("cpu")
Answers = dict[tuple[str, int], Completion]


def wide(kind: str) -> Policy:
    """In float64, where another order of sums is no excuse."""
    torch.manual_seed(0)
    return tiny_policy(kind).double()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return wide("llama")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups pay whenever there are any; the sizes of those that steps were given."""
    seen: list[int] = []
    plain = RowGroups.of

    def noting(self: RowGroups, rows: int, most: int):
        found = plain(self, rows, most)
        seen.extend((found.members >= 0).sum(-1).tolist())
        return found

    monkeypatch.setattr(
        device_state, "sharing_pays", lambda *, saved_keys, key_bytes: saved_keys > 0
    )
    monkeypatch.setattr(RowGroups, "of", noting)
    return seen


def loose(policy: Policy, **limits: int) -> PagedEngine:
    """An engine of which no exactness is asked."""
    policy.is_exact = False
    return paged(policy, **limits)


def exact(policy: Policy, asked: list[Request]) -> Answers:
    policy.is_exact = True
    return generate(paged(policy, rows=16), asked)


def same(one: Answers, other: Answers, *, gap: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, done in one.items():
        assert done.tokens == other[name].tokens, name
        assert done.reason == other[name].reason
        assert done.logps == pytest.approx(other[name].logps, abs=gap)


def mixed() -> list[Request]:
    """Groups with and without full pages, whole pages only, ragged ends, and rows alone."""
    return [
        request(150, 40, name="a", samples=4, stop_ids=frozenset({7, 9, 11})),
        request(128, 30, name="b", samples=3),
        request(20, 20, name="c", samples=3),
        request(70, 12, name="d", samples=1),
        request(65, 70, name="e", samples=2, temperature=0.7),
        request(100, 9, name="f", samples=5, stop_strings=("bc", "xk", "pp", "ma")),
    ]


def test_it_answers_as_rows_that_read_alone(policy, sizes):
    found = generate(loose(policy, rows=18), mixed())
    assert max(sizes) == 5
    same(found, exact(policy, mixed()))


def test_in_fp32_it_differs_by_rounding(sizes):
    policy = tiny_policy("llama")
    found = generate(loose(policy, rows=18), mixed())
    assert max(sizes) == 5
    same(found, exact(policy, mixed()), gap=2e-5)


def test_groups_are_for_engines_that_need_not_be_exact(policy, sizes):
    exact(policy, mixed())
    assert not sizes


def test_groups_that_do_not_pay_are_left_alone(policy, sizes, monkeypatch):
    monkeypatch.setattr(device_state, "sharing_pays", sharing_pays)
    generate(loose(policy, rows=18), mixed())
    assert not sizes


@pytest.mark.parametrize("limits", [{"rows": 3}, {"rows": 7, "tokens": 100}], ids=str)
def test_groups_that_are_seated_in_parts(policy, sizes, limits):
    found = generate(loose(policy, **limits), mixed())
    assert max(sizes) > 1
    same(found, exact(policy, mixed()))


def test_large_groups_are_cut(policy, sizes, monkeypatch):
    monkeypatch.setattr(device_state, "_WIDEST", 4)
    found = generate(loose(policy, rows=18), mixed())
    assert max(sizes) == 4
    same(found, exact(policy, mixed()))


def test_rows_that_are_evicted_come_back_alone(policy, sizes, monkeypatch):
    asked = [request(70, 130, name=f"r{i}", samples=3) for i in range(3)]
    engine = loose(policy, rows=16, pages=14)
    evicted: list[RunningSequence] = []
    act = engine._scheduler._evict

    def noting(seat: RunningSequence) -> None:
        evicted.append(seat)
        act(seat)

    monkeypatch.setattr(engine._scheduler, "_evict", noting)
    found = generate(engine, asked)
    assert evicted
    assert max(sizes) == 3
    same(found, exact(policy, asked))
    assert engine._scheduler.pool.free == engine._scheduler.pool.size


def test_requests_may_come_while_others_run(policy, sizes):
    engine = loose(policy, rows=6)
    right = exact(policy, mixed())
    policy.is_exact = False
    for _ in range(2):
        found: Answers = {}
        waiting = mixed()
        while waiting or not engine.is_idle:
            if waiting:
                engine.submit(waiting.pop())
            found |= {(c.request, c.sample): c for c in engine.advance()}
        same(dict(sorted(found.items())), right)
    assert max(sizes) > 1


def test_an_aborted_group_leaves_the_others_as_they_were(policy, sizes):
    asked = [request(90, 100, name=name, samples=3) for name in ("a", "b", "c")]
    engine = loose(policy, rows=16)
    for one in asked:
        engine.submit(one)
    found: list[Completion] = []
    for _ in range(3):
        found += engine.advance()
    found += engine.abort("b")
    while not engine.is_idle:
        found += engine.advance()
    right = exact(policy, asked)
    assert max(sizes) == 3
    for done in found:
        whole = right[done.request, done.sample]
        assert done.tokens == whole.tokens[: len(done.tokens)]
        assert done.reason == ("aborted" if done.request == "b" else whole.reason)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral", "qwen3"])
def test_windows_caps_and_sinks(name, sizes):
    policy = tiny_policy(name)
    asked = [request(90, 20, name="a", samples=3), request(130, 30, name="b", samples=2)]
    found = generate(loose(policy, rows=16), asked)
    assert max(sizes) == 3
    same(found, exact(policy, asked), gap=2e-5)


def seats_of(*shared_pages: tuple[int, int]) -> list[RunningSequence]:
    """Rows of (last shared page, number of shared pages); the pages before it are the same."""
    row = Row(request(200, 4), 0)
    return [
        RunningSequence(row, [*range(20, 20 + n - 1), last, 90 + i], 200, shared=n)
        for i, (last, n) in enumerate(shared_pages)
    ]


def test_groups_are_rows_with_the_same_last_shared_page():
    seats = seats_of((5, 2), (6, 2), (5, 2), (7, 0), (6, 2), (8, 3), (5, 2))
    assert shared_prefix_groups(seats) == [[0, 2, 6], [1, 4]]
    seats[1].is_over = True
    assert shared_prefix_groups(seats) == [[0, 2, 6]]


def test_prompts_that_only_begin_alike_are_groups_of_their_own(policy, sizes):
    begun = request(128, 1).tokens
    asked = [
        replace(
            request(150, 20, name=name, samples=3),
            tokens=(*begun, *[first + i % 40 for i in range(80)]),
        )
        for name, first in (("a", 3), ("b", 11))
    ]
    engine = loose(policy, rows=16, tokens=210)
    found = generate(engine, asked)
    assert engine.cache_stats().reused_tokens == 128
    assert max(sizes) == 3
    same(found, exact(policy, asked))


def test_parts_of_a_group_are_nearly_equal_and_no_row_is_alone():
    for count in range(2, 40):
        for most in (3, 4, 8):
            parts = split_evenly(range(count), most)
            assert [row for part in parts for row in part] == list(range(count))
            assert max(map(len, parts)) <= most
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert min(map(len, parts)) > 1


def test_tensors_stay_where_they_are_and_forget_who_left(sizes):
    held = RowGroups(8, device=CPU)
    seats = seats_of((5, 2), (5, 2), (5, 2), (6, 1), (6, 1))
    held.arrange(seats, key_bytes=1)
    assert held.most == 4
    first = held.of(8, 4)
    assert first.members.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1], [-1] * 4, [-1] * 4]
    assert first.shared.tolist() == [128, 128, 128, 64, 64, 0, 0, 0]
    held.arrange(seats[2:], key_bytes=1)
    assert held.most == 4, "graphs of fewer members would have to be captured"
    second = held.of(8, 4)
    assert second.members.tolist() == [[1, 2, -1, -1], [-1] * 4, [-1] * 4, [-1] * 4]
    assert second.shared.tolist() == [0, 64, 64, 0, 0, 0, 0, 0]
    assert first.members.data_ptr() == second.members.data_ptr()
    held.arrange(seats[:1], key_bytes=1)
    assert held.most == 0
    held.arrange([], key_bytes=1)
    held.arrange(seats[3:], key_bytes=1)
    assert held.most == 2


def test_every_number_of_rows_has_room_for_its_groups():
    for rows in (1, 2, 3, 7):
        found = RowState(rows, 2, 1, device=CPU).groups.of(rows, 2)
        assert found.members.shape == (max(1, rows // 2), 2)
        assert found.shared.shape == (rows,)


def test_it_pays_by_what_is_not_read_again():
    assert not sharing_pays(saved_keys=0, key_bytes=1 << 30)
    assert sharing_pays(saved_keys=1 << 20, key_bytes=1024)
