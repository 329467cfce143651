"""The real vLLM beside the trainer on one GPU: weights arrive by every transport, and runs learn.

NCCL takes two ranks on one GPU only if they claim different hosts: the server is started under one
name, and this process takes another before the group is made.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.config.schema.actor_rollout_ref import RolloutConfig, ServerConfig
from luyen.config.schema.model import ModelConfig
from luyen.data.tokenizer import load_tokenizer
from luyen.models.load import load_policy
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint
from luyen.rollout.protocol import generate
from luyen.rollout.servers.build import ServerPlace
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.process import ServerProcess
from luyen.rollout.servers.vllm import vllm
from luyen.rollout.servers.weights import GroupTransport, TransferTransport, trainer_logps
from tests.conformance.servers import request
from tests.runs import MODEL, ROLLOUT, train

pytestmark = pytest.mark.gpu

SOURCE = "builtin://arithmetic"
RECIPES = Path(__file__).parents[2] / "recipes"
OPTIONS = {
    "attention_backend": "TRITON_ATTN",  # takes fp32 too
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,  # nothing is measured, so that tests can share the GPU
}
GAP = {"float32": 1e-3, "bfloat16": 0.25}


@pytest.fixture(autouse=True)
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Server and trainer claim different hosts; skips where there is no vLLM or no CUDA."""
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        pytest.skip("needs CUDA, and vllm in this environment")
    places = {"NCCL_HOSTID": "server", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    for transport in (GroupTransport, TransferTransport):
        monkeypatch.setattr(transport, "send", from_trainer(transport.send))
    yield
    torch.cuda.empty_cache()


def from_trainer(send: Callable[..., None]) -> Callable[..., None]:
    """The same, on the host of the trainer: NCCL connects with the first broadcast."""

    def sent(*args: Any) -> None:
        os.environ["NCCL_HOSTID"] = "trainer"
        try:
            send(*args)
        finally:
            os.environ["NCCL_HOSTID"] = "server"

    return sent


def make_engine(policy: Policy, folder: Path, transport: str) -> ServerEngine:
    """An engine over a server of its own."""
    rollout = RolloutConfig(
        name="vllm",
        max_num_seqs=64,
        gpu_memory_utilization=0.1,
        free_cache_engine=False,
        server=ServerConfig.model_validate({"python": sys.executable, "transport": transport}),
        engine_kwargs={"vllm": OPTIONS},
    )
    tokenizer = load_tokenizer(SOURCE)
    decode = partial(tokenizer.decode, skip_special=False)
    place = ServerPlace(source=SOURCE, folder=folder)
    made = vllm(policy, rollout, longest=256, decode=decode, place=place)
    assert isinstance(made, ServerEngine)
    return made


def largest_gap(policy: Policy, engine: ServerEngine, version: int) -> float:
    """Over the tokens of eight answers at temperature 0.7, all of this version."""
    asked = request(policy, 9, 20, samples=8, temperature=0.7)
    gaps: list[float] = []
    for done in generate(engine, [asked]).values():
        ours = trainer_logps(policy, asked.tokens, done.tokens, 0.7)
        gaps.append(float((ours - torch.tensor(done.logps)).abs().max()))
        assert set(done.versions) == {version}
    print(f"largest gaps of eight answers: {[f'{gap:.2g}' for gap in sorted(gaps)]}")
    return max(gaps)


def change(policy: Policy, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["folder", "group", "ipc", "transfer"])
def test_weights_arrive_and_survive_a_kill(transport: str, dtype: str, tmp_path: Path):
    model = ModelConfig.model_validate({"path": SOURCE, "dtype": dtype})
    policy = load_policy(model, device="cuda", vocabulary=load_tokenizer(SOURCE).size)
    engine = make_engine(policy, tmp_path, transport)
    try:
        for version, factor in enumerate((1.0, 1.05, 0.9)):
            change(policy, factor)
            engine.send_weights(version)
            held = engine.fingerprint()
            assert held is not None
            assert held.first_difference(Fingerprint.of(policy)) is None
            assert largest_gap(policy, engine, version) < GAP[dtype]
        if dtype == "bfloat16":
            return
        server = engine._server
        assert isinstance(server, ServerProcess)
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGKILL)
        change(policy, 1.02)
        engine.send_weights(3)
        assert largest_gap(policy, engine, 3) < GAP[dtype]
    finally:
        engine.close()


@pytest.mark.parametrize("transport", ["group", "ipc"])
def test_twenty_steps_of_the_quickstart_learn(transport: str, tmp_path: Path):
    words = (
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.server.python={sys.executable}",
        f"{ROLLOUT}.server.transport={transport}",
        f"{ROLLOUT}.gpu_memory_utilization=0.1",
        f"{ROLLOUT}.free_cache_engine=false",
        *(f"{ROLLOUT}.engine_kwargs.vllm.{name}={value}" for name, value in OPTIONS.items()),
        f"{MODEL}.dtype=float32",
        "trainer.device=cuda",
        "trainer.total_training_steps=20",
        "trainer.test_freq=20",
        "trainer.logger=jsonl",
    )
    ran = train(tmp_path, *words, files=[RECIPES / "quickstart.yaml"])
    first, *_, last = ran.course("val/accuracy")
    print(f"{transport}: accuracy {first:.3f} -> {last:.3f}")
    print(f"largest gap of a step: {max(ran.course('parity/max_gap')):.3g}")
    assert last > first + 0.1
    assert len(ran.course("parity/max_gap")) == 20
    assert max(ran.course("parity/max_gap")) < GAP["float32"]
