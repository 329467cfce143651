"""LoRA adapters that servers load by path: every version, faults, and what is left behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import RolloutConfig, ServerConfig
from luyen.config.schema.model import ModelConfig
from luyen.models.export import checkpoint_tensors
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint, trained_parameters
from luyen.rollout.protocol import generate
from luyen.rollout.servers.build import ServerPlace
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.sglang import sglang, sglang_command
from luyen.rollout.servers.vllm import vllm, vllm_command
from tests.generation import packed_logps, pairs, request, sampled_logps, spell
from tests.peers.driver import EngineDriver
from tests.peers.engines import same_policy
from tests.peers.http import Fault, JsonServer
from tests.peers.sglang_server import SglangPeer
from tests.peers.vllm_server import VllmPeer
from tests.tiny_models import tiny_policy

MAKE = {"sglang": sglang, "vllm": vllm}
LOAD = {"sglang": "/load_lora_adapter", "vllm": "/v1/load_lora_adapter"}
Served = tuple[ServerEngine, JsonServer, SglangPeer | VllmPeer, Policy]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luyen.rollout.servers.engine._BACKOFF_S", 0.01)


def lora_policy() -> Policy:
    policy = tiny_policy("llama", initializer_range=0.15)
    add_adapter(policy.model, ModelConfig(path="tiny", lora_rank=4, lora_alpha=8))
    return policy


@torch.no_grad()
def learn(policy: Policy, seed: int) -> None:
    """Other values of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained_parameters(policy).values():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@contextmanager
def serving(kind: str, folder: Path, *, max_lora_rank: int = 8) -> Iterator[Served]:
    """An engine over a peer that has the model below the adapter."""
    base = tiny_policy("llama", initializer_range=0.15)
    driver = EngineDriver(same_policy(base), decode=spell, folder="tiny")
    settings: Any = {"is_deterministic": True}
    if kind == "vllm":
        settings = {"is_dev_mode": True, "mode": "processed_logprobs", "name": "policy"}
    make: Any = {"sglang": SglangPeer, "vllm": VllmPeer}[kind]
    peer = make(driver, max_lora_rank=max_lora_rank, **settings)
    server = peer.serve()
    policy = lora_policy()
    rollout = RolloutConfig(
        name=kind, server_urls=(server.url,), server=ServerConfig(lora_format="adapter", retries=2)
    )
    place = ServerPlace(source="tiny", folder=folder)
    engine: Any = MAKE[kind](policy, rollout, longest=256, decode=spell, place=place)
    try:
        yield engine, server, peer, policy
    finally:
        engine.close()
        server.close()
        peer.adapters.each(lambda one: one.close())


def check_sound(engine: ServerEngine, policy: Policy, version: int) -> None:
    """Samples of this version that the policy scores the same."""
    asked = [request(5, 6, samples=4)]
    found = pairs(asked, generate(engine, asked))
    gap = packed_logps(policy, found) - sampled_logps(found)
    assert gap.abs().max() < 1e-5
    assert {v for _, done in found for v in done.versions} == {version}


both = pytest.mark.parametrize("kind", ["sglang", "vllm"])


@both
def test_every_version_of_an_adapter_arrives(kind: str, tmp_path: Path):
    with serving(kind, tmp_path) as (engine, _, peer, policy):
        before = peer.driver.checksums()
        for version in range(3):
            learn(policy, version)
            engine.send_weights(version)
            held = engine.fingerprint()
            assert held is not None
            assert held.first_difference(Fingerprint.of(policy)) is None
            check_sound(engine, policy, version)
            assert len(peer.adapters.paths) == 1
        assert peer.driver.checksums() == before
        assert len(list((tmp_path / "adapters").iterdir())) == 1
    assert peer.adapters.paths == {}
    assert not (tmp_path / "adapters").exists()


@both
@pytest.mark.parametrize("fault", ["error", "cut", "deaf"])
def test_a_fault_while_an_adapter_is_loaded_is_recovered(kind: str, fault: Any, tmp_path: Path):
    with serving(kind, tmp_path) as (engine, server, peer, policy):
        learn(policy, 1)
        engine.send_weights(1)
        learn(policy, 2)
        server.faults.plan(Fault(name=fault, path=LOAD[kind]))
        engine.send_weights(2)
        check_sound(engine, policy, 2)
        assert len(peer.adapters.paths) == 1


@both
def test_an_adapter_that_is_never_loaded_ends_the_work(kind: str, tmp_path: Path):
    with serving(kind, tmp_path) as (engine, server, _, policy):
        learn(policy, 1)
        engine.send_weights(1)
        learn(policy, 2)
        server.faults.plan(Fault(name="deaf", path=LOAD[kind], times=None))
        with pytest.raises(UserError, match="other weights"):
            engine.send_weights(2)
        assert engine.fingerprint() is None


@both
def test_a_server_without_lora_refuses_it(kind: str, tmp_path: Path):
    with (
        serving(kind, tmp_path, max_lora_rank=0) as (engine, *_),
        pytest.raises(UserError, match=f"http_{'400' if kind == 'sglang' else '404'}"),
    ):
        engine.send_weights(0)


@both
def test_a_rank_above_the_servers_is_refused(kind: str, tmp_path: Path):
    with (
        serving(kind, tmp_path, max_lora_rank=2) as (engine, *_),
        pytest.raises(UserError, match="rank 4"),
    ):
        engine.send_weights(0)


@both
def test_a_full_disk_is_named_and_former_weights_are_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_args: Any, **_more: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with serving(kind, tmp_path) as (engine, _, _, policy):
        engine.send_weights(1)
        learn(policy, 2)
        with monkeypatch.context() as full:
            full.setattr("luyen.models.export.save_file", refuse)
            with pytest.raises(UserError, match="No space left"):
                engine.send_weights(2)
        assert engine.fingerprint() is None
        engine.send_weights(2)
        check_sound(engine, policy, 2)


def test_a_server_of_ours_starts_from_the_weights_below_the_adapter():
    policy = lora_policy()
    learn(policy, 1)
    plain = checkpoint_tensors(tiny_policy("llama", initializer_range=0.15))
    below, merged = checkpoint_tensors(policy, merges=False), checkpoint_tensors(policy)
    assert below.keys() == plain.keys() == merged.keys()
    assert all(torch.equal(below[name], plain[name]) for name in plain)
    assert any(not torch.equal(merged[name], plain[name]) for name in plain)


def test_commands_let_servers_load_adapters():
    rollout = RolloutConfig(name="vllm")
    where: Any = {"model": Path("m"), "port": 1, "max_model_len": 64, "dtype": "float32"}
    assert "--enable-lora" not in vllm_command(rollout, **where, is_cpu=True)
    words = " ".join(vllm_command(rollout, **where, is_cpu=True, lora_rank=12))
    assert "--enable-lora --max-lora-rank 16" in words
    lora: Any = {"lora_rank": 12, "lora_layers": ["k_proj", "q_proj"]}
    words = " ".join(sglang_command(rollout, **where, device="cpu", **lora))
    assert "--enable-lora --max-lora-rank 12 --lora-target-modules k_proj q_proj" in words
