"""Servers as replicas of a cluster, at staleness 1, and with rollouts of several versions."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.checkpoint.store import CheckpointStore
from luyen.telemetry.rollout_files import read_rollouts
from luyen.train.start import run_training
from tests.e2e.test_server_engines import ARITHMETIC, GRPO, SHORT, VLLM, serving, written
from tests.peers.driver import EngineDriver
from tests.peers.http import Fault, JsonServer
from tests.runs import Ran, report_of, train

ROLLOUT = "actor_rollout_ref.rollout"
WORDS = (
    *ARITHMETIC,
    *SHORT,
    "trainer.total_training_steps=4",
)
RAY = ("trainer.runtime=ray",)
TWO = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.data_parallel_size=2")
SETTINGS: dict[str, Any] = {"vllm": VLLM, "sglang": {"is_deterministic": True}}
Servers = list[tuple[JsonServer, EngineDriver]]


@contextmanager
def several(kind: str, count: int) -> Iterator[tuple[Servers, tuple[str, ...]]]:
    """Peers of a kind, and the words that name them."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(serving("builtin://arithmetic", kind, **SETTINGS[kind]))
            for _ in range(count)
        ]
        urls = ", ".join(server.url for server, _ in found)
        yield found, (f"{ROLLOUT}.name={kind}", f"{ROLLOUT}.server_urls=[{urls}]")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One cluster for all runs: each connects to it, and leaves it."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", found.address)
        yield
    found.shutdown()


def versions(ran: Ran, step: int) -> list[set[int]]:
    """Versions of the tokens of each rollout of a step."""
    file = ran.root / f"rollouts/step_{step:06d}.parquet"
    return [{v for v in one.rollout.versions if v is not None} for one in read_rollouts(file)]


@pytest.mark.usefixtures("cluster")
def test_two_replicas_have_a_server_each(tmp_path: Path):
    with several("vllm", 2) as (servers, named):
        ran = train(
            tmp_path,
            *WORDS,
            *named,
            *RAY,
            *TWO,
            files=written(tmp_path, GRPO),
        )
        assert [driver.version for _, driver in servers] == ["4", "4"]
        assert all(driver.requests > 8 for _, driver in servers)
    assert len(ran.metrics) == 4
    assert max(ran.course("parity/engine_max")) < 1e-3


@pytest.mark.usefixtures("cluster")
def test_a_publication_that_fails_on_a_cluster_leaves_a_checkpoint(
    tmp_path: Path,
):
    with several("sglang", 2) as (servers, named):
        broken = Fault(name="error", path="/update_weights_from_disk", after=2, times=None)
        servers[1][0].faults.plan(broken)
        words = (*WORDS, *named, *RAY, *TWO, "trainer.save_freq=-1")
        report = report_of(tmp_path, *words, files=written(tmp_path, GRPO))
        assert report.is_sound, report.problems
        with pytest.raises(UserError, match="http_500"):
            run_training(report)
    newest = CheckpointStore(tmp_path / "luyen" / "run" / "checkpoints").newest_sound()
    assert newest is not None
    assert newest.step == 2


@pytest.mark.usefixtures("cluster")
def test_a_cluster_at_staleness_1_has_a_server_for_each_version(tmp_path: Path):
    stale = ("trainer.max_staleness=1", f"{ROLLOUT}.data_parallel_size=1")
    with several("sglang", 2) as (servers, named):
        ran = train(tmp_path, *WORDS, *named, *RAY, *stale, files=written(tmp_path, GRPO))
        assert {driver.version for _, driver in servers} == {"2", "4"}
        assert all(driver.requests > 16 for _, driver in servers)
    assert [set().union(*versions(ran, step)) for step in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]
    assert ran.course("parity/engine_max")[0] < 1e-3


def test_a_publication_that_fails_at_staleness_1_leaves_a_checkpoint(tmp_path: Path):
    with several("sglang", 2) as (servers, named):
        # Each server gets every other version: the second one gets versions 1 and 3.
        broken = Fault(name="error", path="/update_weights_from_disk", after=1, times=None)
        servers[1][0].faults.plan(broken)
        words = (*WORDS, *named, "trainer.max_staleness=1", "trainer.save_freq=-1")
        files = written(tmp_path, GRPO)
        with pytest.raises(UserError, match="http_500"):
            run_training(report_of(tmp_path, *words, files=files))
        store = CheckpointStore(tmp_path / "luyen" / "run" / "checkpoints")
        newest = store.newest_sound()
        assert newest is not None
        assert newest.step >= 2
        servers[1][0].faults.clear()
        run_training(report_of(tmp_path, *words, "trainer.resume_mode=auto", files=files))
        finished = store.newest_sound()
        assert finished is not None
        assert finished.step == 4


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_partial_rollouts_go_on_with_the_next_version(kind: str, tmp_path: Path):
    partial = ("trainer.max_staleness=1", "trainer.async_order=completion")
    with several(kind, 1) as (servers, named):
        servers[0][1].pause_s = 0.4
        ran = train(tmp_path, *WORDS, *named, *partial, files=written(tmp_path, GRPO))
    found = [one for step in range(1, 5) for one in versions(ran, step)]
    assert len(ran.metrics) == 4
    assert any(len(one) > 1 for one in found)
    assert max(map(max, found)) >= 2
