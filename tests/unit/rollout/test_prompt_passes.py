"""Passes over prompts: what a captured pass holds beside its tokens changes nothing."""

import numpy as np
import pytest
import torch

from luyen.models.policy import Policy
from luyen.rollout.native.paged.kv_cache import KeyValues, cache_shape
from luyen.rollout.native.paged.prefill import (
    LARGEST_PASS,
    PassNumbers,
    PassShape,
    pass_numbers,
    passes_of,
    read_pass,
)
from tests.generation import prompt
from tests.tiny_models import tiny_policy

PROMPTS = [prompt(n) for n in (130, 1, 64, 70)]
PAGES = [[5, 9, 1], [3], [7], [2, 8]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return tiny_policy("llama")


def read(policy: Policy, cache: KeyValues, shape: PassShape, part: list[tuple[int, int, int]]):
    flat = torch.from_numpy(pass_numbers(shape, PROMPTS, PAGES, part))
    with torch.no_grad():
        return read_pass(policy, cache, shape, flat)[: len(part)]


def caches(policy: Policy, count: int) -> list[KeyValues]:
    return [KeyValues(cache_shape(policy), 12, device=policy.device) for _ in range(count)]


def test_a_padded_pass_gives_what_one_of_its_own_size_gives(policy: Policy):
    part = [(row, 0, len(tokens)) for row, tokens in enumerate(PROMPTS)]
    own, padded = caches(policy, 2)
    total = sum(len(tokens) for tokens in PROMPTS)
    small = read(policy, own, PassShape(tokens=total, chunks=4, pages=3), part)
    large = read(policy, padded, PassShape.captured(total, 4, 6), part)
    assert torch.equal(small, large)
    for layer in range(cache_shape(policy).layers):
        assert torch.equal(own.layer(layer).keys, padded.layer(layer).keys)
        assert torch.equal(own.layer(layer).values, padded.layer(layer).values)
    assert own.layer(0).keys[5].count_nonzero() > 0
    assert padded.layer(0).keys[[0, 4, 6, 10, 11]].count_nonzero() == 0, "padding is stored nowhere"


def test_a_prompt_read_in_two_passes_gives_what_one_pass_gives(policy: Policy):
    one, two = caches(policy, 2)
    whole = read(policy, one, PassShape.captured(130, 1, 3), [(0, 0, 130)])
    read(policy, two, PassShape.captured(67, 1, 3), [(0, 0, 67)])
    rest = read(policy, two, PassShape.captured(63, 1, 3), [(0, 67, 63)])
    torch.testing.assert_close(whole, rest)


def test_every_query_of_a_pass_is_in_one_tile():
    shape = PassShape.captured(265, 4, 3)
    part = [(0, 0, 130), (1, 0, 1), (2, 0, 64), (3, 0, 70)]
    found = PassNumbers.of(shape, pass_numbers(shape, PROMPTS, PAGES, part))
    seen = [
        (chunk, first + i)
        for chunk, first in found.tiles.tolist()
        for i in range(64)
        if first + i < found.queries[chunk]
    ]
    assert sorted(seen) == [(row, i) for row, _, count in part for i in range(count)]


def test_programs_that_look_at_most_keys_come_first():
    shape = PassShape.captured(265, 4, 3)
    part = [(3, 0, 70), (0, 0, 130)]
    found = PassNumbers.of(shape, pass_numbers(shape, PROMPTS, PAGES, part))
    assert found.tiles[:5].tolist() == [[1, 128], [1, 64], [0, 64], [1, 0], [0, 0]]


def test_a_captured_pass_has_room_for_whatever_a_part_holds():
    for tokens in range(1, LARGEST_PASS + 1, 37):
        for chunks in (1, 7, 64):
            if chunks <= tokens:
                shape = PassShape.captured(tokens, chunks, 4)
                assert shape.tokens >= tokens
                assert shape.chunks >= chunks
                # Cut into chunks of one more than a tile, the most programs are needed.
                assert shape.tiles >= tokens // 64 + chunks
    assert PassShape.captured(LARGEST_PASS, 64, 4).tokens == LARGEST_PASS


def test_passes_hold_so_many_chunks_at_most():
    assert passes_of([2, 2, 2], [0, 1, 0], 10, chunks=2) == [[(0, 0, 2), (1, 1, 1)], [(2, 0, 2)]]


def test_an_empty_pass_stores_nothing(policy: Policy):
    (cache,) = caches(policy, 1)
    shape = PassShape.captured(1, 1, 3)
    flat = pass_numbers(shape, (), (), ())
    assert np.array_equal(PassNumbers.of(shape, flat).slots, np.full(256, -1))
    with torch.no_grad():
        read_pass(policy, cache, shape, torch.from_numpy(flat))
    assert cache.layer(0).keys.count_nonzero() == 0
