"""Rollout engines over peers in this process: the adapters of the package, with real numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from luyen.models.policy import Policy
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import ServerDialect
from luyen.rollout.servers.engine import ServerEngine, ServerLimits
from luyen.rollout.servers.openai import OpenAiDialect
from luyen.rollout.servers.process import AttachedServer
from luyen.rollout.servers.sglang import SglangDialect
from luyen.rollout.servers.vllm import VllmDialect
from luyen.rollout.servers.weights import FolderTransport
from tests.generation import spell
from tests.peers.driver import EngineDriver
from tests.peers.http import JsonServer
from tests.peers.sglang_server import SglangPeer
from tests.peers.vllm_server import VllmPeer

SERVERS = ("sglang", "vllm", "openai")


def other_policy(policy: Policy, *, seed: int = 7) -> Policy:
    """The same architecture with other weights, and no row that the tokenizer does not know."""
    net: Any = policy.model
    config = type(net.config)(**{**net.config.to_dict(), "vocab_size": policy.head.vocabulary})
    torch.manual_seed(seed)
    made = type(net)(config).to(torch.float32).eval()
    return Policy(made, vocabulary=policy.head.vocabulary).eval()


def same_policy(policy: Policy) -> Policy:
    """A copy with the same weights, for servers that take none."""
    from luyen.models.export import checkpoint_tensors

    copied = other_policy(policy)
    own = dict(copied.model.named_parameters())
    with torch.no_grad():
        for name, tensor in checkpoint_tensors(policy).items():
            own[name].copy_(tensor)
    return copied


def serve_sglang(driver: EngineDriver) -> JsonServer:
    return SglangPeer(driver, is_deterministic=True, has_memory_saver=True).serve()


def serve_vllm(driver: EngineDriver) -> JsonServer:
    settings: dict[str, Any] = {"is_dev_mode": True, "has_sleep_mode": True}
    return VllmPeer(driver, mode="processed_logprobs", name="policy", **settings).serve()


def serve_raw_vllm(driver: EngineDriver) -> JsonServer:
    return VllmPeer(driver, is_dev_mode=True).serve()


SERVE: dict[str, Callable[[EngineDriver], JsonServer]] = {
    "sglang": serve_sglang,
    "vllm": serve_vllm,
    "openai": serve_raw_vllm,
}


def dialect_of(name: str) -> ServerDialect:
    if name == "vllm":
        return VllmDialect(has_extension=False, can_sleep=True)
    return SglangDialect(can_sleep=True) if name == "sglang" else OpenAiDialect()


@contextmanager
def served_engine(
    name: str, policy: Policy, folder: Path, *, timeout_s: float = 30.0, rows: int = 8
) -> Iterator[tuple[ServerEngine, JsonServer, EngineDriver]]:
    """An engine over a peer that begins with other weights; the peer, and the driver in it."""
    start = same_policy if name == "openai" else other_policy
    driver = EngineDriver(start(policy), decode=spell, folder="tiny")
    server = SERVE[name](driver)
    dialect = dialect_of(name)
    connection = ServerConnection(lambda: server.url, timeout_s=timeout_s)
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    transport = None
    if name != "openai":
        transport = FolderTransport(connection, dialect, model=model, folder=folder / "weights")
    engine = ServerEngine(
        AttachedServer(server.url),
        connection,
        dialect,
        transport,
        policy=policy,
        decode=spell,
        limits=ServerLimits(max_model_len=driver.longest, max_num_seqs=rows),
        has_own_weights=name == "openai",
    )
    try:
        yield engine, server, driver
    finally:
        engine.close()
        connection.close()
        server.close()
        driver.close()
