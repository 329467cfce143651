"""Training through servers: the templates of people who come from verl, and servers with faults.

The servers speak the protocols of SGLang and vLLM over the embedded engine, so that their numbers
are real.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.checkpoint.store import CheckpointStore
from luyen.models.load import model_directory
from luyen.telemetry.metrics import read_metrics
from luyen.train.start import run_training
from tests.peers.driver import EngineDriver
from tests.peers.http import Fault, JsonServer
from tests.peers.models import open_driver
from tests.peers.sglang_server import SglangPeer
from tests.peers.vllm_server import VllmPeer
from tests.runs import report_of, train

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
    "trainer.experiment_name=run",
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


GRPO = """
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {rollout: {name: sglang, n: 4}}
"""


FAILURES = {
    # Of 16 samples a step and a probe a publication, those of the third step fail.
    "generation": ("sglang", Fault(name="error", path="/generate", after=40, times=None), 2),
    # Version 0 is published first, so that the third step's weights are the fourth ones.
    "publication": (
        "sglang",
        Fault(name="error", path="/update_weights_from_disk", after=3, times=None),
        3,
    ),
    "deaf": ("vllm", Fault(name="deaf", path="/collective_rpc", after=3, times=None), 3),
}
"""What fails for good: the server, its fault, and the last step that the run can save."""


@pytest.mark.parametrize("name", FAILURES)
def test_a_server_that_fails_for_good_ends_the_run_with_its_cause_and_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("luyen.rollout.servers.engine._BACKOFF_S", 0.01)
    kind, fault, last = FAILURES[name]
    settings = VLLM if kind == "vllm" else {"is_deterministic": True}
    with serving("builtin://arithmetic", kind, **settings) as (server, _):
        words = (
            *ARITHMETIC,
            *SHORT,
            f"actor_rollout_ref.rollout.name={kind}",
            f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
            "trainer.total_training_steps=4",
            "trainer.save_freq=-1",
        )
        whole = train(tmp_path / "whole", *words, files=written(tmp_path, GRPO))
        server.faults.plan(fault)
        report = report_of(tmp_path, *words, files=written(tmp_path, GRPO))
        assert report.is_sound, report.problems
        with pytest.raises(UserError, match=kind) as caught:
            run_training(report)
        assert ("other weights" if name == "deaf" else "http_500") in str(caught.value)
        root = tmp_path / "luyen" / "run"
        newest = CheckpointStore(root / "checkpoints").newest_sound()
        assert newest is not None
        assert newest.step == last
        # The server is well again: the run goes on from there, as if nothing had happened.
        server.faults.clear()
        more = ("trainer.resume_mode=auto",)
        run_training(report_of(tmp_path, *words, *more, files=written(tmp_path, GRPO)))
        assert [line.step for line in read_metrics(root / "metrics.jsonl")] == [1, 2, 3, 4]
        assert (root / "digests.jsonl").read_text() == (whole.root / "digests.jsonl").read_text()


def test_a_running_sglang_server_joins_a_process_group(tmp_path: Path):
    with serving("builtin://arithmetic", "sglang", is_deterministic=True) as (server, driver):
        ran = train(
            tmp_path,
            *ARITHMETIC,
            *SHORT,
            f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
            "actor_rollout_ref.rollout.server.transport=group",
            files=written(tmp_path, GRPO),
        )
        assert driver.version == "2"
    assert max(ran.course("parity/engine_max")) < 1e-3


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_run_of_an_adapter_publishes_the_adapter_alone(kind: str, tmp_path: Path):
    settings = VLLM if kind == "vllm" else {"is_deterministic": True}
    with serving("builtin://arithmetic", kind, max_lora_rank=8, **settings) as (server, driver):
        before = driver.checksums()
        ran = train(
            tmp_path,
            *ARITHMETIC,
            *SHORT,
            f"actor_rollout_ref.rollout.name={kind}",
            f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
            "actor_rollout_ref.rollout.server.lora_format=adapter",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.actor.optim.lr=0.01",
            files=written(tmp_path, GRPO),
        )
        assert driver.checksums() == before
    assert len(ran.metrics) == 2
    assert max(ran.course("parity/engine_max")) < 1e-3


def peer_python(folder: Path) -> Path:
    """What a run takes for the python of an environment with SGLang."""
    script = folder / "python"
    paths = f"{ROOT / 'src'}:{ROOT}"
    script.write_text(
        "#!/bin/sh\nshift 2\n"
        f"cd {ROOT} && PYTHONPATH={paths} exec {sys.executable} -m tests.peers.sglang_server "
        '"$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_a_server_of_the_run_that_is_killed_is_started_again(tmp_path: Path):
    words = (
        *ARITHMETIC,
        *SHORT,
        f"actor_rollout_ref.rollout.server.python={peer_python(tmp_path)}",
        "trainer.total_training_steps=3",
    )
    report = report_of(tmp_path, *words, files=written(tmp_path, GRPO))
    assert report.is_sound, report.problems
    root = tmp_path / "luyen" / "run"
    killed: list[int] = []

    def kill_once() -> None:
        """After the first step: the guard leads a group, and the server is its other member."""
        deadline = time.monotonic() + 300
        while not (root / "metrics.jsonl").is_file() or not (root / "metrics.jsonl").read_text():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        for found in Path("/proc").glob("[0-9]*"):
            try:
                line = (found / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "tests.peers.sglang_server" in line and any(str(tmp_path) in word for word in line):
                killed.append(int(found.name))
                os.kill(int(found.name), signal.SIGKILL)

    killer = threading.Thread(target=kill_once, daemon=True)
    killer.start()
    run_training(report)
    killer.join()
    assert len(killed) == 1
    lines = read_metrics(root / "metrics.jsonl")
    assert [line.step for line in lines] == [1, 2, 3]
    assert max(line.values["parity/engine_max"] for line in lines) < 1e-3
