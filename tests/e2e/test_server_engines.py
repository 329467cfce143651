"""Training through servers: the templates of people who come from verl, and servers with faults.

The servers speak the protocols of SGLang and vLLM over the embedded engine, so that their numbers
are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from luyen.models.load import model_directory
from tests.peers.driver import EngineDriver
from tests.peers.http import JsonServer
from tests.peers.models import open_driver
from tests.peers.sglang_server import SglangPeer
from tests.peers.vllm_server import VllmPeer
from tests.runs import train

ROOT = Path(__file__).parents[2]

PPO_ON_VLLM = """
algorithm:
  adv_estimator: gae
  use_kl_in_reward: false

actor_rollout_ref:
  rollout:
    name: vllm
    n: 1

critic:
  enable: true
"""

GRPO_ON_SGLANG = """
algorithm:
  adv_estimator: grpo

actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.001
  rollout:
    name: sglang
    n: 8
    multi_turn:
      enable: true
      tool_config_path: {tools}

data:
  return_raw_chat: true
"""
"""As people write them; rows, a model and tools are given besides."""

ARITHMETIC = (
    "actor_rollout_ref.model.path=builtin://arithmetic",
    "data.train_files=arithmetic://sum?digits=2&size=64",
)
CALCULATOR = (
    "actor_rollout_ref.model.path=builtin://tools",
    "data.train_files=tools://calculator?size=64",
)
SHORT = (
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "data.train_batch_size=4",
    "trainer.total_training_steps=2",
    "trainer.logger=jsonl",
)
"""What keeps a test short, and changes nothing that the templates say."""


@contextmanager
def serving(model: str, kind: str, **settings: Any) -> Iterator[tuple[JsonServer, EngineDriver]]:
    """A peer over a model of the package."""
    driver = open_driver(model_directory(model), longest=512)
    peer: Any = {"sglang": SglangPeer, "vllm": VllmPeer}[kind](driver, **settings)
    server = peer.serve()
    try:
        yield server, driver
    finally:
        server.close()
        driver.close()


VLLM = {"mode": "processed_logprobs", "is_dev_mode": True}


def written(folder: Path, text: str) -> list[Path]:
    path = folder / "run.yaml"
    path.write_text(text)
    return [path]


def test_ppo_on_vllm_runs_as_written(tmp_path: Path):
    with serving("builtin://arithmetic", "vllm", **VLLM) as (server, driver):
        ran = train(
            tmp_path,
            *ARITHMETIC,
            *SHORT,
            f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
            files=written(tmp_path, PPO_ON_VLLM),
        )
        assert driver.version == "2"
    assert len(ran.metrics) == 2
    assert max(ran.course("parity/engine_max")) < 1e-3
    assert len(ran.course("critic/vf_loss")) == 2


def test_grpo_with_tools_on_sglang_runs_as_written(tmp_path: Path):
    tools = ROOT / "recipes" / "tools" / "calculator.yaml"
    with serving("builtin://tools", "sglang", is_deterministic=True) as (server, driver):
        ran = train(
            tmp_path,
            *CALCULATOR,
            *SHORT,
            f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
            files=written(tmp_path, GRPO_ON_SGLANG.format(tools=tools)),
        )
        assert driver.version == "2"
    assert len(ran.metrics) == 2
    assert max(ran.course("parity/engine_max")) < 1e-3
    assert max(ran.course("tools/ok_calls")) > 0
