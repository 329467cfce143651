"""Three stages end to end: a sound reward model helps, a flawed one is hacked and found out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.studio.doctor.diagnose import diagnose
from luyen.studio.doctor.record import read_run
from luyen.telemetry.metrics import read_metrics, series
from tests.e2e.recipes import PIPELINES
from tests.kill.zygote import Zygote

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipelines() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


def trained(name: str, folder: Path, pipelines: Zygote) -> Path:
    """The run directory of the last stage."""
    log = folder / "log.txt"
    words = ["trainer.logger=jsonl", f"trainer.default_local_dir={folder}"]
    assert pipelines.train(PIPELINES[name], *words, log=log) == 0, log.read_text()
    return next(folder.glob("*/ppo"))


def ends(root: Path, name: str) -> tuple[float, float]:
    """A metric at its first and at its last measurement."""
    _, values = series(read_metrics(root / "metrics.jsonl"), name)
    return values[0], values[-1]


def test_a_sound_reward_model_raises_the_true_reward(tmp_path: Path, pipelines: Zygote):
    root = trained("pipeline_sft_rm_ppo", tmp_path, pipelines)
    before, after = ends(root, "val/reward/even/mean")
    assert after > before + 0.2
    assert "reward-hacking" not in {finding.rule for finding in diagnose(read_run(root))}


def test_a_flawed_reward_model_is_hacked_and_the_doctor_says_so(tmp_path: Path, pipelines: Zygote):
    root = trained("pipeline_flawed_reward", tmp_path, pipelines)
    learned, true = ends(root, "val/reward/taste/mean"), ends(root, "val/reward/exact/mean")
    assert learned[1] > learned[0]
    assert true[1] < true[0] - 0.2
    [finding] = [f for f in diagnose(read_run(root)) if f.rule == "reward-hacking"]
    assert "reward/exact/mean, which is watched, fell" in finding.symptom.says
