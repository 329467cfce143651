"""The two-part cache gives what the slotted one gives, whatever comes and goes."""

import copy

import pytest
import torch

from luyen.models.attention import AttentionWindow
from luyen.models.policy import Policy
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.native.kv_cache import SharedPrefixCache, SlottedCache, can_split
from luyen.rollout.protocol import Completion, Request
from tests.generation import packed_logps, pairs, request, sampled_logps, spell
from tests.tiny_models import tiny_policy

CPU = torch.device("cpu")


def engine(policy: Policy, *, is_exact: bool | None, rows: int = 8) -> NativeEngine:
    return NativeEngine(
        policy,
        max_model_len=256,
        max_num_seqs=rows,
        max_num_batched_tokens=256,
        decode=spell,
        is_exact=is_exact,
    )


def answers(made: NativeEngine, asked: list[Request]) -> dict[tuple[str, int], Completion]:
    for one in asked:
        made.submit(one)
    found: dict[tuple[str, int], Completion] = {}
    while not made.is_idle:
        found |= {(done.request, done.sample): done for done in made.advance()}
    return found


def asked(**sampling) -> list[Request]:
    """Prompts and answers of different lengths; six rows at once split two of the groups."""
    return [
        request(5, 9, name="a", samples=4, **sampling),
        request(33, 21, name="b", samples=3, **sampling),
        request(1, 2, name="c", samples=1, **sampling),
        request(17, 40, name="d", samples=5, **sampling),
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "cohere2", "gpt_neox"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}], ids=["sampled", "greedy"])
@torch.no_grad()
def test_answers_are_those_of_the_slotted_form(kind, sampling):
    policy = tiny_policy(kind)
    assert can_split(policy)
    slotted = answers(engine(policy, is_exact=True, rows=6), asked(**sampling))
    split = answers(engine(policy, is_exact=False, rows=6), asked(**sampling))
    assert split.keys() == slotted.keys()
    for name, done in slotted.items():
        assert split[name].tokens == done.tokens
        assert split[name].logps == pytest.approx(done.logps, abs=1e-5)


@torch.no_grad()
def test_rows_that_stop_early_leave_the_others_as_they_are():
    policy = tiny_policy()
    stops = {"stop_ids": frozenset(range(3, 12))}
    slotted = answers(engine(policy, is_exact=True), asked(**stops))
    split = answers(engine(policy, is_exact=False), asked(**stops))
    assert {done.reason for done in split.values()} == {"stop", "length"}
    assert {k: d.tokens for k, d in split.items()} == {k: d.tokens for k, d in slotted.items()}


@torch.no_grad()
def test_an_aborted_group_frees_its_slot_and_nothing_else():
    policy = tiny_policy()
    whole = answers(engine(policy, is_exact=True), asked()[1:2])
    made = engine(policy, is_exact=False)
    for one in asked()[:2]:
        made.submit(one)
    for _ in range(4):
        made.advance()
    assert len(made.abort("a")) == 4
    found: dict[tuple[str, int], Completion] = {}
    while not made.is_idle:
        found |= {(done.request, done.sample): done for done in made.advance()}
    assert {k: d.tokens for k, d in found.items()} == {k: d.tokens for k, d in whole.items()}


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_caps_and_sinks_keep_the_slotted_form(kind):
    policy = tiny_policy(kind)
    assert not can_split(policy)
    wanted = asked(temperature=0.0)
    slotted = answers(engine(policy, is_exact=True), wanted)
    made = answers(engine(policy, is_exact=False), wanted)
    assert {k: d.tokens for k, d in made.items()} == {k: d.tokens for k, d in slotted.items()}


@torch.no_grad()
def test_bf16_answers_are_as_near_to_fp32_as_those_of_the_slotted_form():
    policy = tiny_policy(initializer_range=0.1).to(torch.bfloat16)
    truth = copy.deepcopy(policy).float()
    gaps: list[float] = []
    for is_exact in (True, None):
        found = pairs(asked(), answers(engine(policy, is_exact=is_exact), asked()))
        gaps.append(float((sampled_logps(found) - packed_logps(truth, found)).abs().mean()))
    assert gaps[1] < 1.25 * gaps[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sliding", [None, 6])
def test_attention_in_two_parts_is_attention(dtype, sliding):
    torch.manual_seed(0)
    lengths, members = [3, 20], [(0, 2), (2, 3)]
    packed = [torch.randn(23, 2, 16, dtype=dtype) for _ in range(2)]
    caches = SlottedCache(rows=3, length=64), SharedPrefixCache()
    for cache in caches:
        cache.make_room(3, 64)
        cache.sink([0, 3], lengths, members).store(0, packed[0], packed[1])
    for step in range(20):
        positions = [3 + step, 3 + step, 20 + step]
        query, key, value = (torch.randn(1, h, 3, 16, dtype=dtype) for h in (4, 2, 2))
        slotted, split = (
            cache.step(positions, CPU).attend(
                0, query, key, value, 0.25, AttentionWindow(sliding=sliding)
            )
            for cache in caches
        )
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        assert torch.allclose(split.float(), slotted.float(), atol=tolerance, rtol=tolerance)


def test_a_slot_is_freed_with_its_last_row_and_the_last_slot_takes_its_place():
    cache = SharedPrefixCache()
    keys = torch.arange(6.0)[:, None, None] + 1
    cache.make_room(3, 8)
    cache.sink([0, 2, 3], [2, 1, 3], [(0, 1), (1, 2), (2, 3)]).store(0, keys, keys)
    cache.remove(0, 2, 3)
    kept, _ = cache.prompt(0)
    assert kept[..., 0, 0].tolist() == [[4.0, 5.0, 6.0], [3.0, 0.0, 0.0]]
    cache.remove(0, 1, 1)
    kept, _ = cache.prompt(0)
    assert kept[..., 0, 0].tolist() == [[3.0]]


def test_a_first_token_may_end_an_answer_while_others_run():
    made = engine(tiny_policy("llama"), is_exact=False, rows=16)
    for one in (request(5, 30, name="long", samples=2), request(6, 30, name="more", samples=2)):
        made.submit(one)
    made.advance()
    made.advance()
    late = [request(7, 1, name="one", samples=1), request(8, 9, name="three", samples=3)]
    for one in late:
        made.submit(one)
    found = {}
    while not made.is_idle:
        found.update({(c.request, c.sample): c for c in made.advance()})
    assert {name for name, _ in found} == {"long", "more", "one", "three"}


def test_single_answers_do_not_keep_groups_from_sharing_later():
    made = engine(tiny_policy("llama"), is_exact=False, rows=16)
    answers(made, [request(5, 4, name="single")])
    made.submit(request(5, 4, name="group", samples=4))
    made.advance()
    assert isinstance(made._cache, SharedPrefixCache)
