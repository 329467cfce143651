"""Real servers: `make test-engines` makes their environment, and says where it is."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from luyen.config.schema.actor_rollout_ref import RolloutConfig, ServerConfig
from luyen.config.schema.model import ModelConfig
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.models.load import load_policy
from luyen.models.policy import Policy
from luyen.rollout.servers.build import ServerPlace
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.vllm import vllm

MODEL = "builtin://arithmetic"
VARIABLE = "LUYEN_VLLM_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
LONGEST = 256
PATIENCE_S = 3600.0
"""Most seconds of a start, a request or a step: only what hangs takes so long on a busy machine."""
PATIENT = {"start_timeout_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a server that is not installed."""
    mark = pytest.mark.skip(reason=f"{VARIABLE} names no python with vLLM: make test-engines")
    for item in items:
        if Path(__file__).parent in item.path.parents and not PYTHON:
            item.add_marker(mark)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="session")
def decode(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return partial(tokenizer.decode, skip_special=False)


def make_policy(tokenizer: Tokenizer, *, lora_rank: int = 0) -> Policy:
    model = ModelConfig(path=MODEL, lora_rank=lora_rank)
    return load_policy(model, device="cpu", vocabulary=tokenizer.size)


def make_engine(
    policy: Policy, decode: Callable[[Sequence[int]], str], folder: Path, **server: object
) -> ServerEngine:
    """An engine over a server of its own, which starts with the first request."""
    rollout = RolloutConfig(
        name="vllm",
        max_num_seqs=64,
        free_cache_engine=bool(server.pop("free_cache_engine", False)),
        server=ServerConfig.model_validate({"python": PYTHON, **PATIENT, **server}),
    )
    place = ServerPlace(source=MODEL, folder=folder)
    made = vllm(policy, rollout, longest=LONGEST, decode=decode, place=place)
    assert isinstance(made, ServerEngine)
    return made


@pytest.fixture(scope="session")
def policy(tokenizer: Tokenizer) -> Policy:
    return make_policy(tokenizer)


@pytest.fixture(scope="session")
def engine(
    policy: Policy,
    decode: Callable[[Sequence[int]], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerEngine]:
    """One server for all tests that leave it as it was."""
    made = make_engine(policy, decode, tmp_path_factory.mktemp("vllm"), transport="group")
    yield made
    made.close()
