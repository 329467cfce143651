"""What may be another when a run goes on: the table, the comparison, and names of runs."""

from datetime import datetime
from pathlib import Path

import pytest
import yaml

from luyen.base.rundir import RunDirectory
from luyen.config.check import check
from luyen.config.fields import all_blocks, all_fields
from luyen.config.loader.load import load
from luyen.config.loader.parse import stored_values
from luyen.config.loader.paths import ARGUMENTS, FILES, MODELS
from luyen.config.resume import (
    MAY_CHANGE,
    changed_keys,
    default_run_name,
    kind_of,
    resume_arguments,
)

ROWS = "data.train_files=arithmetic://sum"
MODEL = "actor_rollout_ref.model"


def begun(root: Path, *words: str, folder: Path | None = None) -> RunDirectory:
    """A run of this configuration that has measured a step."""
    config = yaml.safe_dump(stored_values(check([], [ROWS, *words]).config))
    written = dict.fromkeys((word.partition("=")[0] for word in (ROWS, *words)), "command line")
    facts = {"folder": str(folder)} if folder else {}
    place = root / "luyen" / "run"
    run = RunDirectory.create(place, config=config, provenance=written, manifest=facts)
    run.metrics.write_text("a step\n")
    return run


def test_the_table_holds_keys_and_blocks_that_exist():
    names = [name for group in MAY_CHANGE.values() for name in group]
    assert [name for name in names if name not in all_fields() and name not in all_blocks()] == []
    assert len(names) == len(set(names))


def test_keys_that_hold_paths_are_listed_as_such():
    ends = ("path", "files", "plugins", "dir")
    paths = {key for key in all_fields() if key.endswith(ends)}
    known = {*FILES, *MODELS, *ARGUMENTS}
    assert paths - known == set()
    assert known <= set(all_fields())


@pytest.mark.parametrize(
    "key",
    [
        f"{MODEL}.path",
        f"{MODEL}.lora_rank",
        "data.train_files",
        "data.train_batch_size",
        "algorithm.adv_estimator",
        "algorithm.gamma",
        "actor_rollout_ref.actor.clip_ratio",
        "actor_rollout_ref.rollout.n",
        "reward.components",
        "trainer.seed",
        "trainer.stage",
    ],
)
def test_what_makes_a_run_another_one_may_not_change(key: str):
    assert kind_of(key) is None


@pytest.mark.parametrize(
    "key", ["trainer.n_gpus_per_node", "trainer.nnodes", "actor_rollout_ref.actor.strategy"]
)
def test_the_number_of_processes_may_change(key: str):
    assert kind_of(key) == "machine"


def test_check_names_each_changed_key_with_both_values(tmp_path: Path):
    run = begun(tmp_path, "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4")
    place = f"trainer.default_local_dir={tmp_path}"
    words = [ROWS, place, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
    found = {p.field: p for p in check([], words).problems if p.id == "S24"}
    assert set(found) == {"algorithm.adv_estimator", "actor_rollout_ref.rollout.n"}
    assert (found["actor_rollout_ref.rollout.n"].value, found["algorithm.adv_estimator"].value) == (
        8,
        "grpo",
    )
    assert f"the run in {run.root} has 'rloo'" in found["algorithm.adv_estimator"].why
    assert "experiment_name" in found["algorithm.adv_estimator"].fix


def test_a_run_that_has_done_nothing_may_begin_otherwise(tmp_path: Path):
    run = begun(tmp_path)
    run.metrics.unlink()
    report = check([], [ROWS, f"trainer.default_local_dir={tmp_path}", "trainer.seed=5"])
    assert "S24" not in {p.id for p in report.problems}


def test_check_says_what_a_run_goes_on_with(tmp_path: Path):
    run = begun(tmp_path)
    run.checkpoint(3).mkdir(parents=True)
    words = [ROWS, f"trainer.default_local_dir={tmp_path}", "actor_rollout_ref.actor.optim.lr=0.5"]
    [note] = [p for p in check([], words).problems if p.id == "S08"]
    assert "step_000003, with actor_rollout_ref.actor.optim.lr 1e-06 -> 0.5" in note.why
    assert "default_local_dir" not in note.why
    [over] = [
        p for p in check([], [*words, "trainer.total_training_steps=3"]).problems if p.id == "S08"
    ]
    assert "has all of its 3 steps: nothing is left to do" in over.why


def test_a_run_that_would_be_another_one_is_not_said_to_go_on(tmp_path: Path):
    begun(tmp_path).checkpoint(3).mkdir(parents=True)
    words = [ROWS, f"trainer.default_local_dir={tmp_path}", "trainer.seed=5"]
    found = {p.id: p for p in check([], words).problems}
    assert "S08" not in found
    assert "resume_from_path" in found["S24"].fix


def test_other_weights_cannot_be_begun_with_from_a_checkpoint(tmp_path: Path):
    begun(tmp_path).checkpoint(3).mkdir(parents=True)
    words = [ROWS, f"trainer.default_local_dir={tmp_path}", f"{MODEL}.lora_rank=8"]
    [error] = [p for p in check([], words).problems if p.id == "S24"]
    assert error.fix == "choose another trainer.experiment_name"


def test_a_logger_without_its_package_is_an_error_of_check():
    report = check([], [ROWS, "trainer.logger=[console, wandb]"], installed=lambda _: False)
    assert ("S14", "error") in {(p.id, p.severity) for p in report.problems}


def test_a_relative_path_means_the_file_below_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(home)
    run = begun(home / "runs", "data.train_files=rows.jsonl", folder=home)
    now = check([], ["data.train_files=rows.jsonl"]).config
    assert changed_keys(run, now) == []
    assert load([run.config], []).values["data"]["train_files"] == [str(home / "rows.jsonl")]
    monkeypatch.chdir(elsewhere)
    assert load([run.config], []).values["data"]["train_files"] == [str(home / "rows.jsonl")]
    again = check([], [f"data.train_files={home / 'rows.jsonl'}"]).config
    assert [one for one in changed_keys(run, again) if one.kind != "place"] == []


def test_a_run_without_a_name_is_called_after_its_file_and_the_time(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {train_files: arithmetic://sum}\n")
    found = check([file], []).config.trainer.experiment_name
    assert found.startswith("mine-20")
    assert check([file], ["trainer.experiment_name=a"]).config.trainer.experiment_name == "a"
    when = datetime(2026, 1, 2, 3, 4, 5).astimezone()
    assert (
        default_run_name([file], when).values["trainer"]["experiment_name"]
        == "mine-20260102-030405"
    )
    named = tmp_path / "named.yaml"
    named.write_text("trainer: {default_local_dir: '/runs/${trainer.experiment_name}'}\n")
    trainer = check([named], [ROWS]).config.trainer
    assert trainer.default_local_dir == f"/runs/{trainer.experiment_name}"


def test_a_run_goes_on_by_its_own_configuration_wherever_it_lies(tmp_path: Path):
    run = begun(tmp_path, "trainer.seed=7", "trainer.experiment_name=12")
    run.root.rename(tmp_path / "luyen" / "34")
    file, words = resume_arguments(tmp_path / "luyen" / "34")
    report = check([file], words)
    trainer = report.config.trainer
    assert (trainer.seed, trainer.experiment_name) == (7, "34")
    assert report.is_sound, report.problems
    # What the user did not write is a default still: nothing speaks of `val_before_train`.
    assert "trainer.val_before_train" not in report.origins
