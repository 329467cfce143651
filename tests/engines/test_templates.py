"""Configurations as people write them, over the real vLLM: PPO, and replicas on a cluster."""

from pathlib import Path

import pytest

from tests.e2e.test_server_engines import ARITHMETIC, GRPO, PPO_ON_VLLM, SHORT, written
from tests.engines.test_runs import GAP, VLLM
from tests.runs import ROLLOUT, train

COMPLETIONS = "POST /v1/completions"


def test_ppo_on_vllm_runs_as_written(tmp_path: Path):
    ran = train(tmp_path, *ARITHMETIC, *SHORT, *VLLM, files=written(tmp_path, PPO_ON_VLLM))
    assert len(ran.metrics) == 2
    assert max(ran.course("parity/engine_max")) < GAP
    assert len(ran.course("critic/vf_loss")) == 2


def test_two_replicas_on_ray_have_a_server_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # other work would starve servers at 15
    words = (
        f"{ROLLOUT}.data_parallel_size=2",
        "trainer.runtime=ray",
        "trainer.n_gpus_per_node=2",
    )
    ran = train(tmp_path, *ARITHMETIC, *SHORT, *VLLM, *words, files=written(tmp_path, GRPO))
    assert len(ran.metrics) == 2
    assert max(ran.course("parity/engine_max")) < GAP
    logs = list(ran.root.glob("servers/*/server.log"))
    assert [log.read_text().count(COMPLETIONS) > 8 for log in logs] == [True, True]
