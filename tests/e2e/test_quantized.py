"""Runs over 4-bit weights: exact sampling on a CPU, resuming, and the model that is exported."""

import shutil
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.config.check import check
from luyen.telemetry.metrics import read_metrics
from luyen.train.start import run_training
from tests.e2e.tiny import luyen
from tests.runs import MODEL, TINY, train

NF4 = (f"{MODEL}.quantization=nf4", f"{MODEL}.lora_rank=4")


RATE = "actor_rollout_ref.actor.optim.lr=1.0e-3"


def chain(root: Path) -> list[str]:
    return [line.chain for line in read_digests(root / "digests.jsonl")]


def offline(folder: Path, *words: str, is_tiny: bool = True) -> Path:
    small = ("data.train_batch_size=4", "trainer.logger=jsonl", "trainer.save_freq=2")
    tiny = [word for word in TINY if is_tiny and word.startswith(MODEL)]
    place = f"trainer.default_local_dir={folder}"
    report = check([], [*tiny, *small, *NF4, place, "trainer.total_training_steps=4", *words])
    assert report.is_sound, report.problems
    run_training(report)
    return folder / report.config.trainer.project_name / report.config.trainer.experiment_name


@pytest.mark.parametrize("double", ["true", "false"])
def test_the_sampler_has_the_trainers_numbers_and_resuming_is_exact(double: str, tmp_path: Path):
    words = (*NF4, f"{MODEL}.double_quantization={double}", "trainer.save_freq=2")
    words += ("trainer.total_training_steps=4",)
    ran = train(tmp_path, *words)
    assert ran.course("parity/max_gap") == [0.0] * 4
    assert all("lora_" in name for name in ran.weights)
    before = chain(ran.root)
    shutil.rmtree(ran.root / "checkpoints" / "step_000004")
    train(tmp_path, *words)
    assert chain(ran.root) == before


@pytest.mark.parametrize(
    "words",
    [
        ("trainer.stage=sft", "data.train_files=arithmetic://sum?traces=1"),
        ("trainer.stage=preference", "data.train_files=arithmetic://sum?pairs=even"),
    ],
    ids=["sft", "dpo"],
)
def test_an_offline_stage_resumes_to_the_same_bits(words: tuple[str, ...], tmp_path: Path):
    done = offline(tmp_path, *words)
    before = chain(done)
    shutil.rmtree(done / "checkpoints" / "step_000004")
    offline(tmp_path, *words)
    assert chain(done) == before
    losses = [line.values for line in read_metrics(done / "metrics.jsonl") if line.step]
    assert len(losses) == 4


def test_the_exported_model_is_scored_as_the_run_was(tmp_path: Path):
    """The built-in model in 4 bits, trained, merged, and read as any other model."""
    rows = ("data.train_files=arithmetic://sum?traces=1", "trainer.stage=sft")
    rows += ("data.val_files=arithmetic://sum?traces=1&split=held-out&size=8",)
    done = offline(tmp_path, *rows, "trainer.test_freq=4", RATE, is_tiny=False)
    lines = [line for line in read_metrics(done / "metrics.jsonl") if "sft/val_nll" in line.values]
    before, after = lines[0], lines[-1]
    assert (before.step, after.step) == (0, 4)
    assert after.values["sft/val_nll"] != before.values["sft/val_nll"]
    made = luyen("export", done, tmp_path / "exported", "--merge")
    assert made.exit_code == 0, made.output
    whole = (f"{MODEL}.path={tmp_path / 'exported'}", f"{MODEL}.quantization=none")
    again = offline(tmp_path / "again", *rows, *whole, "trainer.test_freq=4", is_tiny=False)
    [first, *_] = read_metrics(again / "metrics.jsonl")
    assert first.values["sft/val_nll"] == pytest.approx(after.values["sft/val_nll"], rel=1e-4)
