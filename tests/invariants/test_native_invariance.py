"""The embedded engine: limits, order and company never change an answer."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.rollout.protocol import Completion, generate
from tests.generation import native, request
from tests.tiny_models import tiny_policy

POLICY = tiny_policy("qwen2", initializer_range=0.15)
REQUESTS = [
    request(1, 9, samples=3),
    request(2, 17, stop_ids=frozenset(range(0, 60, 7))),
    request(5, 12, samples=5, temperature=0.7),
    request(30, 6, temperature=0.0),
    request(33, 40, top_k=5, stop_strings=("a", "kb")),
    request(70, 3, samples=2, top_p=0.6, temperature=1.3),
]
EXPECTED = generate(native(POLICY, rows=64, tokens=512, longest=128), REQUESTS)


@given(
    rows=st.integers(1, 9),
    tokens=st.integers(70, 130),
    order=st.permutations(range(len(REQUESTS))),
    count=st.integers(1, len(REQUESTS)),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_neither_limits_nor_order_nor_company_change_an_answer(rows, tokens, order, count):
    chosen = [REQUESTS[i] for i in order[:count]]
    found = generate(native(POLICY, rows=rows, tokens=tokens, longest=128), chosen)
    names = {asked.id for asked in chosen}
    assert found == {key: done for key, done in EXPECTED.items() if key[0] in names}


def test_requests_that_arrive_while_others_run_change_nothing():
    engine = native(POLICY, rows=4, tokens=128, longest=128)
    found: dict[tuple[str, int], Completion] = {}
    for asked in REQUESTS:
        engine.submit(asked)
        for _ in range(3):
            found |= {(d.request, d.sample): d for d in engine.advance()}
    while not engine.is_idle:
        found |= {(d.request, d.sample): d for d in engine.advance()}
    assert found == EXPECTED


def test_a_group_larger_than_the_rows_is_answered_in_parts():
    asked = request(11, 8, samples=7)
    wide = generate(native(POLICY, rows=7), [asked])
    assert generate(native(POLICY, rows=2), [asked]) == wide
    assert len({done.tokens for done in wide.values()}) == 7


def test_aborting_running_answers_leaves_the_others_as_they_would_be():
    engine = native(POLICY, rows=5, longest=128)
    long, group = REQUESTS[4], dataclasses.replace(REQUESTS[2], id="group")
    engine.submit(group)
    engine.submit(long)
    for _ in range(4):
        engine.advance()
    aborted = engine.abort("group")
    assert [done.sample for done in aborted] == [0, 1, 2, 3, 4]
    whole = [EXPECTED[REQUESTS[2].id, i].tokens for i in range(5)]
    assert all(
        0 < len(d.tokens) < len(w) and d.tokens == w[: len(d.tokens)]
        for d, w in zip(aborted, whole, strict=True)
    )
    found = {}
    while not engine.is_idle:
        found |= {(d.request, d.sample): d for d in engine.advance()}
    assert found == {(long.id, 0): EXPECTED[long.id, 0]}


@pytest.mark.parametrize(("length", "new"), [(129, 1), (120, 20), (65, 1)])
def test_a_request_beyond_the_limits_is_refused(length: int, new: int):
    engine = native(POLICY, tokens=64, longest=128)
    with pytest.raises(UserError, match="max_model_len"):
        engine.submit(request(length, new))


def test_a_sequence_may_fill_the_limit_exactly():
    asked = request(64, 64)
    exact = generate(native(POLICY, tokens=64, longest=128), [asked])
    assert exact == generate(native(POLICY, longest=512), [asked])
