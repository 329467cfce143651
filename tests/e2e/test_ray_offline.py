"""Offline stages on Ray: two ranks learn what one process does, resume anywhere, outlive a loss."""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from luyen.base.digests import StepDigest, read_digests
from luyen.config.check import Report
from luyen.runtime.offline import OfflineRoles
from luyen.runtime.ray.ranks import RankGroup
from luyen.studio.timeline import read_processes
from luyen.telemetry.callbacks import Callback, TrainingProgress
from luyen.telemetry.metrics import StepMetrics, read_metrics
from luyen.train import start
from luyen.train.offline import start as offline_start
from luyen.train.offline.loop import OfflineRun
from luyen.train.start import run_training
from tests.kill.offline import OFFLINE
from tests.runs import MODEL, TINY, report_of

pytest.importorskip("ray", reason="the extra `ray` is not installed")
TWO = "trainer.n_gpus_per_node=2"
SHORT = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=3")
KINDS = {**OFFLINE, "reward model, LoRA": (*OFFLINE["reward model"], f"{MODEL}.lora_rank=4")}
_ONLINE = ("actor_rollout_ref.rollout", "algorithm.", "reward.", "actor_rollout_ref.actor.ppo_mini")


@pytest.fixture(scope="module", autouse=True)
def cluster(cluster_address: str) -> Iterator[None]:
    """One cluster for all runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", cluster_address)
        yield


def checked(folder: Path, kind: str, *words: str) -> Report:
    given = [word for word in TINY if not word.startswith(_ONLINE)]
    report = report_of(folder, *given, *KINDS[kind], *SHORT, *words, "data.val_max_samples=3")
    assert report.is_sound, report.problems
    return report


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run has left."""

    root: Path
    metrics: list[StepMetrics]
    digests: list[StepDigest]

    @property
    def chain(self) -> list[str]:
        return [line.chain for line in self.digests]


def trained(folder: Path, kind: str, *words: str, told: tuple[Callback, ...] = ()) -> Trained:
    run_training(checked(folder, kind, *words), callbacks=told)
    root = folder / "luyen" / "run"
    return Trained(
        root=root,
        metrics=list(read_metrics(root / "metrics.jsonl")),
        digests=list(read_digests(root / "digests.jsonl")),
    )


def demand_close(one: Trained, other: Trained) -> None:
    """The same rows and tokens to the bit, and the same course up to the order of sums."""
    assert [line.step for line in one.metrics] == [line.step for line in other.metrics]
    for mine, theirs in zip(one.digests, other.digests, strict=True):
        for stage in ("prompts", "rollouts"):
            assert mine.stages.get(stage) == theirs.stages.get(stage)
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        assert mine.timeless().keys() == theirs.timeless().keys()
        for name, value in mine.timeless().items():
            slack = 1e-9 if name.endswith("grad_norm") else 2e-6
            assert theirs.values[name] == pytest.approx(value, rel=1e-5, abs=slack), name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("two"), "sft", TWO)


def test_two_ranks_learn_from_rows_what_one_process_learns(two_ranks: Trained, tmp_path: Path):
    demand_close(trained(tmp_path, "sft"), two_ranks)
    last = two_ranks.metrics[-1].values
    assert 0 < last["role/actor/busy"] <= 1
    assert last["wait/controller_on_actor"] > 0
    processes = read_processes(two_ranks.root)
    assert [(p.role, p.index) for p in processes[1:]] == [("actor", 0), ("actor", 1)]
    assert {"update", "scores", "weight_sums"} <= {span.name for span in processes[1].spans}


def test_one_process_continues_what_two_ranks_have_saved(two_ranks: Trained, tmp_path: Path):
    shutil.copytree(two_ranks.root.parent.parent, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "luyen/run/checkpoints/step_000003")
    again = trained(tmp_path, "sft")
    assert again.chain[:3] == two_ranks.chain[:3]
    demand_close(again, two_ranks)


class Killer(Callback):
    """Kills a rank while its run does what follows on the second step, once."""

    def __init__(self) -> None:
        self.pids: list[list[int]] = []

    def prepare(self, report: Report) -> OfflineRun:
        run = offline_start.prepare_offline(report)
        roles: OfflineRoles = run.roles
        assert isinstance(roles.workers, RankGroup)
        self.pids.append(roles.workers.pids)
        return run

    def on_step(self, progress: TrainingProgress, metrics: Mapping[str, float]) -> None:
        del metrics
        if progress.step == 2 and len(self.pids) == 1:
            os.kill(self.pids[0][1], signal.SIGKILL)


def test_a_killed_rank_costs_time_and_nothing_else(
    two_ranks: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    killer = Killer()
    monkeypatch.setattr(start, "prepare_offline", killer.prepare)
    outlived = trained(tmp_path, "sft", TWO, told=(killer,))
    assert len(killer.pids) == 2, "the ranks began again"
    assert "beginning again" in capsys.readouterr().err
    assert outlived.chain == two_ranks.chain


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sft"])
def test_every_stage_learns_on_two_ranks_what_one_process_learns(kind: str, tmp_path: Path):
    demand_close(trained(tmp_path / "one", kind), trained(tmp_path / "two", kind, TWO))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "KTO, precomputed"])
def test_one_rank_has_the_chain_of_one_process(kind: str, tmp_path: Path):
    here = trained(tmp_path / "here", kind)
    assert trained(tmp_path / "there", kind, "trainer.runtime=ray").chain == here.chain
