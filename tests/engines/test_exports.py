"""What `luyen export` writes, served by the real vLLM: the log-probabilities are ours."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from luyen.config.schema.actor_rollout_ref import RolloutConfig, ServerConfig
from luyen.data.tokenizer import Tokenizer
from luyen.models.export import export_tokenizer
from luyen.pipeline.export import export_checkpoint
from luyen.pipeline.policy_loading import open_checkpoint
from luyen.rollout.protocol import generate
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.engine import ServerEngine, ServerLimits
from luyen.rollout.servers.process import ServerProcess
from luyen.rollout.servers.vllm import VllmDialect, vllm_command, vllm_environment
from tests.conformance.servers import gap, request
from tests.engines.conftest import LONGEST, MODEL, PATIENCE_S, PYTHON
from tests.runs import MODEL as FIELD
from tests.runs import TINY, train
from tests.tiny_models import tiny_net

FAMILIES = ("llama", "qwen3", "gemma2")


def random_model(kind: str, folder: Path, tokenizer: Tokenizer) -> Path:
    """A model of a family with heads of 32 dimensions, and the built-in tokenizer."""
    net = tiny_net(
        kind,
        vocab_size=tokenizer.size,
        hidden_size=128,
        head_dim=32,
        max_position_embeddings=LONGEST,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=1,
    )
    net.save_pretrained(folder)
    export_tokenizer(MODEL, folder)
    return folder


def serve(folder: Path, model: Path, connection: list[ServerConnection]) -> ServerProcess:
    """The real server over a model's folder."""
    rollout = RolloutConfig(name="vllm", server=ServerConfig(python=PYTHON))
    dialect = VllmDialect(has_extension=False)
    return ServerProcess(
        lambda port: vllm_command(
            rollout,
            model=model,
            port=port,
            max_model_len=LONGEST,
            dtype="float32",
            is_cpu=True,
        ),
        prepare=lambda: vllm_environment(folder, True),
        log=folder / "server.log",
        is_ready=lambda: connection[0].is_ready(dialect.health()),
        start_timeout_s=PATIENCE_S,
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_exported_model_has_our_log_probabilities(
    kind: str, tokenizer: Tokenizer, decode: Callable[[Sequence[int]], str], tmp_path: Path
):
    model = random_model(kind, tmp_path / "model", tokenizer)
    recipe = tmp_path / "run.yaml"
    recipe.write_text("trainer: {total_training_steps: 1}\n")
    words = [word for word in TINY if not word.startswith((f"{FIELD}.init", f"{FIELD}.override"))]
    ran = train(tmp_path / "runs", *words, f"{FIELD}.path={model}", files=[recipe])
    exported = tmp_path / "exported"
    export_checkpoint(str(ran.root), exported, merge=None)
    policy = open_checkpoint(str(ran.root)).policy
    connections: list[ServerConnection] = []
    server = serve(tmp_path, exported, connections)
    connections.append(ServerConnection(lambda: server.url, timeout_s=PATIENCE_S))
    engine = ServerEngine(
        server,
        connections[0],
        VllmDialect(has_extension=False),
        None,
        policy=policy,
        decode=decode,
        limits=ServerLimits(max_model_len=LONGEST, max_num_seqs=32),
        has_own_weights=True,
    )
    try:
        for temperature in (1.0, 0.7):
            asked = request(policy, 33, 24, samples=4, temperature=temperature, ignore_stop=True)
            found = generate(engine, [asked]).values()
            assert max(gap(policy, asked, done) for done in found) < 1e-3
    finally:
        engine.close()
        connections[0].close()
