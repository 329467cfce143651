"""Captured passes over prompts give the bits of passes that are launched call by call."""

import pytest
import torch

from luyen.rollout.protocol import Completion, Request, generate
from tests.generation import paged, request
from tests.tiny_models import tiny_policy

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def policy():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    return tiny_policy("llama").to("cuda")


def asked(first: int, *, seed: int = 0) -> list[Request]:
    lengths = [1, 63, 64, 65, 300, 700, 5, 1100, 257]
    return [
        request(n, 12 + n % 7, name=f"{first}-{n}", samples=1 + n % 3, seed=seed) for n in lengths
    ]


def same(one: dict[tuple[str, int], Completion], other: dict[tuple[str, int], Completion]) -> None:
    assert one.keys() == other.keys()
    for name, done in one.items():
        assert (done.tokens, done.logps) == (other[name].tokens, other[name].logps), name


@pytest.mark.parametrize("budget", [2048, 300, 33])
def test_captured_passes_change_no_bit(policy, budget):
    captured = paged(policy, rows=32, tokens=budget)
    eager = paged(policy, rows=32, is_eager=True)
    for number in range(2):  # the second time the graphs are there already
        same(generate(captured, asked(number)), generate(eager, asked(number)))
    assert captured._reader.is_captured
    assert captured._reader._buffers


def test_many_short_prompts_are_read_in_passes_of_64(policy):
    many = [request(1 + i % 9, 3, name=f"s{i}", seed=i) for i in range(150)]
    same(
        generate(paged(policy, rows=256), many),
        generate(paged(policy, rows=8, is_eager=True), many),
    )


def test_a_continued_conversation_has_the_bits_of_the_whole_one(policy):
    engine, plain = (
        paged(policy, rows=8, is_open=True, enable_prefix_caching=has_cache)
        for has_cache in (True, False)
    )
    first = request(200, 90, name="a")
    for used in (engine, plain):
        generate(used, [first])
    answer = generate(engine, [request(200, 90, name="a")])[("a", 0)].tokens
    longer = Request(
        id="b", tokens=(*first.tokens, *answer, 7, 8, 9), keys=(5,), sampling=first.sampling
    )
    same(generate(engine, [longer]), generate(plain, [longer]))
    assert engine.cache_stats().reused_tokens > 0


def test_a_graph_reads_the_weights_that_are_there_now(policy):
    engine = paged(policy, rows=8)
    before = generate(engine, [request(40, 20, name="w")])
    saved = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn_like(p))
    try:
        fresh = generate(paged(policy, rows=8, is_eager=True), [request(40, 20, name="w")])
        engine.drop_prefixes()
        same(generate(engine, [request(40, 20, name="w")]), fresh)
        assert fresh[("w", 0)].logps != before[("w", 0)].logps
    finally:
        with torch.no_grad():
            for name, p in policy.named_parameters():
                p.copy_(saved[name])
