"""What the engine holds while it works and while it rests."""

import pytest
import torch

from luyen.rollout.native.kv_cache import SharedPrefixCache, SlottedCache
from tests.generation import holds_copies, native, request
from tests.tiny_models import tiny_policy


def test_room_grows_and_keeps_what_is_cached():
    cache = SlottedCache(rows=1, length=8)
    fresh = torch.randn(3, 2, 4)
    cache.sink([0], [3], [(0, 1)]).store(0, fresh, fresh)
    cache.make_room(3, 600)
    keys, _ = cache.layer(0, fresh, fresh)
    assert keys.shape[0] == 3
    assert keys.shape[2] >= 600
    assert torch.equal(keys[0, :, :3], fresh.transpose(0, 1))
    assert keys[1:].abs().max() == 0


def test_own_room_follows_what_is_drawn():
    cache = SharedPrefixCache()
    fresh = torch.randn(1, 2, 4)
    cache.make_room(2, 4096)
    cache.sink([0], [1], [(0, 2)]).store(0, fresh, fresh)
    cache.step([1, 1], torch.device("cpu"))
    assert cache.own_room(0, fresh, fresh)[0].shape[1] == 16
    kept = cache.own_room(0, fresh, fresh)[0].fill_(2.0).clone()
    cache.step([17, 3], torch.device("cpu"))
    grown = cache.own_room(0, fresh, fresh)[0]
    assert grown.shape[1] == 32
    assert torch.equal(grown[:, :16], kept)
    assert grown[:, 16:].abs().max() == 0


@pytest.mark.parametrize("samples", [1, 4])
@torch.no_grad()
def test_an_engine_in_bf16_holds_no_shared_prompts_and_no_copies_at_rest(samples):
    policy = tiny_policy(hidden_size=256, intermediate_size=256).to(torch.bfloat16)
    engine = native(policy)
    engine.submit(request(5, 20, samples=samples))
    engine.advance()
    assert isinstance(engine._cache, SharedPrefixCache if samples > 1 else SlottedCache)
    engine.advance()
    assert engine._linears is not None
    while not engine.is_idle:
        engine.advance()
    assert not isinstance(engine._cache, SharedPrefixCache)
    assert not holds_copies(engine._linears)
