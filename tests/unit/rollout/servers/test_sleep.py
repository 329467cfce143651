"""Servers that sleep between generations: memory is given back, and taken with the next request."""

from pathlib import Path

import pytest
import torch

from luyen.rollout.protocol import generate
from luyen.rollout.servers.engine import ServerEngine
from tests.generation import packed_logps, pairs, request, sampled_logps
from tests.peers.engines import served_engine
from tests.peers.http import Fault, JsonServer
from tests.peers.processes import call
from tests.tiny_models import tiny_policy


def is_awake(name: str, server: JsonServer) -> bool:
    """Whether the server would generate."""
    if name == "vllm":
        return not call(f"{server.url}/is_sleeping")[1]["is_sleeping"]
    sampling = {"max_new_tokens": 1}
    body = {"input_ids": [1, 2], "sampling_params": sampling}
    return call(f"{server.url}/generate", body)[0] == 200


def check_sound(engine: ServerEngine) -> None:
    asked = [request(5, 6, samples=4)]
    found = pairs(asked, generate(engine, asked))
    gap = packed_logps(engine._policy, found) - sampled_logps(found)
    assert gap.abs().max() < 1e-5


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_sleeps_until_it_is_needed(name: str, tmp_path: Path):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(name, policy, tmp_path) as (engine, server, driver):
        engine.send_weights(1)
        check_sound(engine)
        assert is_awake(name, server)
        engine.rest()
        assert not is_awake(name, server)
        engine.rest()
        check_sound(engine)
        assert is_awake(name, server)
        # Weights that arrive while it sleeps wake it.
        engine.rest()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.05)
        engine.send_weights(2)
        assert driver.version == "2"
        check_sound(engine)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_that_does_not_wake_at_once_is_woken_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("luyen.rollout.servers.engine._BACKOFF_S", 0.01)
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(name, policy, tmp_path) as (engine, server, _):
        engine.send_weights(1)
        engine.rest()
        path = "/wake_up" if name == "vllm" else "/resume_memory_occupation"
        server.faults.plan(Fault(name="error", path=path, times=2))
        check_sound(engine)
