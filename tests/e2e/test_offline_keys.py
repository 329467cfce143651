"""What a check says of offline stages holds: keys it calls unread change nothing."""

from pathlib import Path

import pytest

from luyen.config.check import Report
from luyen.config.fields import all_fields
from luyen.config.rules.rule import value_at
from luyen.config.rules.stages import is_unread
from luyen.telemetry.metrics import read_metrics
from luyen.train.start import run_training
from tests.fuzz.accepted import COMMON, STAGES
from tests.fuzz.values import all_values
from tests.runs import report_of

OFFLINE = [stage for stage in STAGES if stage != "rl"]
_WORDS = ("trainer.total_training_steps=2",)


def checked(folder: Path, stage: str, *words: str) -> Report:
    own = [*COMMON, *STAGES[stage], f"trainer.stage={stage}", *_WORDS, *words]
    return report_of(folder, *own)


def metrics(report: Report) -> list[dict[str, float]]:
    run_training(report)
    trainer = report.config.trainer
    root = Path(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name
    return [line.timeless() for line in read_metrics(root / "metrics.jsonl")]


def unread_words(folder: Path, stage: str) -> list[str]:
    """Every key that the stage is said not to read, at another value, where one is accepted."""
    words: list[str] = []
    for key in (key for key in all_fields() if is_unread(key, stage)):
        for value in all_values()[key]:
            report = checked(folder, stage, *words, f"{key}={value}")
            if report.is_sound and value_at(report.config, key) != all_fields()[key].default:
                words.append(f"{key}={value}")
                break
    return words


@pytest.mark.parametrize("stage", OFFLINE)
def test_keys_that_a_stage_does_not_read_change_nothing_and_are_named(stage: str, tmp_path: Path):
    words = unread_words(tmp_path / "none", stage)
    assert len(words) > 80
    changed = checked(tmp_path / "changed", stage, *words)
    notes = [p for p in changed.problems if p.id == "Y10"]
    said = " ".join(f"{note.field} {note.why}" for note in notes)
    assert [word for word in words if word.partition("=")[0] not in said] == []
    assert metrics(changed) == metrics(checked(tmp_path / "usual", stage))


def test_the_aggregation_of_a_supervised_run_is_the_one_that_is_asked_for(tmp_path: Path):
    agg = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    half = "actor_rollout_ref.actor.loss_scale_factor=12"
    whole = metrics(checked(tmp_path / "whole", "sft", agg))
    scaled = metrics(checked(tmp_path / "half", "sft", agg, half))
    name = next(name for name in whole[0] if name.endswith("grad_norm"))
    assert scaled[0][name] == pytest.approx(whole[0][name] / 2, rel=1e-4)


def test_an_offline_stage_with_two_devices_is_accepted_and_planned(tmp_path: Path):
    for stage in OFFLINE:
        for words in (
            ("trainer.n_gpus_per_node=2",),
            ("trainer.nnodes=2",),
            ("trainer.n_gpus_per_node=2", "trainer.runtime=ray"),
        ):
            report = checked(tmp_path, stage, *words)
            assert report.is_sound, report.problems
            where = report.plan.where
            assert (where.world_size, where.runtime, where.replicas) == (2, "ray", 0)
            assert where.roles[0].engine == "fsdp2"
        found = checked(tmp_path, stage, "trainer.n_gpus_per_node=2", "trainer.runtime=local")
        assert [p.id for p in found.problems if p.severity == "error"] == ["S02"]
