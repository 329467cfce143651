"""`rollout.name: openai` over llama.cpp's real server: sampling, scores, and an evaluation."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.config.schema.actor_rollout_ref import RolloutConfig, ServerConfig
from luyen.config.schema.model import ModelConfig
from luyen.data.tokenizer import load_tokenizer
from luyen.models.download import convert_gguf
from luyen.models.load import load_policy
from luyen.models.policy import Policy
from luyen.rollout.protocol import generate
from luyen.rollout.servers.build import ServerPlace
from luyen.rollout.servers.openai import openai
from tests.conformance.servers import gap, request
from tests.peers.processes import PeerProcess
from tests.unit.cli.test_models import tiny_gguf

pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp's server) is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model: as a GGUF file, and as a folder with the same weights."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_gguf(folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "plain")
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[PeerProcess]:
    with PeerProcess("llama_server", model / "tiny.gguf") as found:
        yield found


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    folder = str(model / "plain")
    tokenizer = load_tokenizer(folder)
    return load_policy(ModelConfig(path=folder), device="cpu", vocabulary=tokenizer.size)


def engine_of(policy: Policy, server: PeerProcess, model: Path, logprobs: Any) -> Any:
    rollout = RolloutConfig(
        name="openai", server_urls=(server.url,), server=ServerConfig(logprobs=logprobs)
    )
    place = ServerPlace(source=str(model / "plain"), folder=model / "server")
    decode = partial(load_tokenizer(str(model / "plain")).decode, skip_special=False)
    return openai(policy, rollout, longest=48, decode=decode, place=place)


@pytest.mark.parametrize(
    ("logprobs", "temperature"), [("raw", 1.0), ("raw", 0.0), ("llama_cpp", 0.7)]
)
def test_log_probabilities_are_those_of_the_weights(
    policy: Policy, server: PeerProcess, model: Path, logprobs: str, temperature: float
):
    engine = engine_of(policy, server, model, logprobs)
    stops = frozenset({2})
    asked = request(policy, 9, 12, samples=8, temperature=temperature, stop_ids=stops)
    found = generate(engine, [asked])
    engine.close()
    assert len(found) == 8
    for done in found.values():
        assert done.reason == ("stop" if done.tokens[-1] == 2 else "length")
        assert gap(policy, asked, done) < 1e-3


def test_a_temperature_whose_scores_cannot_be_known_is_refused(
    policy: Policy, server: PeerProcess, model: Path
):
    engine = engine_of(policy, server, model, "raw")
    with pytest.raises(UserError, match="before the temperature"):
        engine.submit(request(policy, 9, 12, temperature=0.7))
    engine.close()
    engine = engine_of(policy, server, model, "llama_cpp")
    with pytest.raises(UserError, match="leave them out"):
        engine.submit(request(policy, 9, 12, temperature=0.7, ignore_stop=True))
    engine.close()


def test_an_evaluation_asks_the_endpoint(server: PeerProcess, model: Path):
    rows = model / "rows.jsonl"
    rows.write_text(
        '{"prompt": [{"role": "user", "content": "abc"}], "reward_model": {"ground_truth": "d"}}\n'
        * 2
    )
    config = model / "endpoint.yaml"
    config.write_text(
        f"actor_rollout_ref: {{rollout: {{name: openai, server_urls: [{server.url}]}}}}\n"
        "data: {max_prompt_length: 40, max_response_length: 8}\n"
        "reward: {components: {answer: {rule: exact}}}\n"
    )
    words = ["eval", str(model / "plain"), "--config", str(config), "--data", str(rows)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output
