"""Peers over tiny random models, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from luyen.models.policy import Policy
from tests.generation import spell
from tests.peers.driver import EngineDriver
from tests.peers.http import JsonServer
from tests.peers.sglang_server import SglangPeer
from tests.peers.vllm_server import VllmPeer
from tests.tiny_models import tiny_net

SIZE = 64
"""Rows of the vocabulary of a tiny model: servers know no smaller one."""


def server_policy(*, seed: int = 0) -> Policy:
    """A tiny policy that samples from every row of its vocabulary, as servers do."""
    net = tiny_net("llama", seed=seed, initializer_range=0.15)
    return Policy(net, vocabulary=SIZE).eval()


def save_net(policy: Policy, folder: Path) -> Path:
    """A model's folder without a tokenizer."""
    net: Any = policy.model
    net.save_pretrained(folder)
    return folder


def driver_of(
    policy: Policy, *, eos_ids: frozenset[int] = frozenset(), **more: Any
) -> EngineDriver:
    """A driver over this very policy."""
    return EngineDriver(policy, decode=spell, eos_ids=eos_ids, folder="tiny", **more)


@contextmanager
def sglang(driver: EngineDriver, **settings: Any) -> Iterator[JsonServer]:
    """An SGLang peer that listens inside the block."""
    yield from _serving(driver, SglangPeer(driver, **settings).serve())


@contextmanager
def vllm(driver: EngineDriver, **settings: Any) -> Iterator[JsonServer]:
    """A vLLM peer that listens inside the block."""
    yield from _serving(driver, VllmPeer(driver, **settings).serve())


def _serving(driver: EngineDriver, server: JsonServer) -> Iterator[JsonServer]:
    try:
        yield server
    finally:
        server.close()
        driver.close()


@torch.no_grad()
def log_softmax(policy: Policy, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """float64 log-probabilities after each token, by transformers' own forward."""
    from luyen.models.hf_generation import hf_attention

    with hf_attention(policy):
        logits = policy.model(input_ids=torch.tensor([tokens])).logits[0].double()
    return (logits / temperature).log_softmax(-1)
