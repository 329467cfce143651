"""A pipeline is read with the line of every key, and all of it is checked before any of it runs."""

from pathlib import Path

import pytest

from luyen.base.rundir import RunDirectory
from luyen.config.check import check
from luyen.config.loader.load import load
from luyen.config.loader.tree import ConfigTree
from luyen.config.named_files import refs_in, with_artifacts, with_paths
from luyen.config.pipeline import Pipeline, StageReport, check_pipeline, is_pipeline, read_pipeline
from luyen.telemetry.artifact_registry import note
from luyen.telemetry.artifacts import Artifact, hash_files, hash_of

MODEL = "actor_rollout_ref.model"
TEXT = """\
name: demo
defaults:
  trainer: {seed: 3}
  data: {train_files: ["arithmetic://sum?digits=1"], train_batch_size: 8}
  actor_rollout_ref:
    actor: {ppo_mini_batch_size: 8}
stages:
  - name: sft
    config:
      trainer: {stage: sft, total_training_steps: 4}
      data: {train_files: ["arithmetic://sum?digits=1&traces=1"]}
      actor_rollout_ref:
        model:
          path: builtin://arithmetic
          init: random
          override_config: {num_hidden_layers: 7}
  - name: rl
    file: base.yaml
    config:
      actor_rollout_ref:
        model: {path: "artifact:sft"}
        rollout: {n: 4}
"""


def write(folder: Path, text: str = TEXT) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(text)
    (folder / "base.yaml").write_text(
        "trainer:\n  {total_training_steps: 9, experiment_name: base, project_name: base}\n"
    )
    return file


def read(folder: Path, text: str = TEXT, *overrides: str) -> Pipeline:
    return read_pipeline([write(folder, text)], overrides)


def checked(pipeline: Pipeline) -> dict[str, StageReport]:
    assert pipeline.problems == ()
    return {stage.name: stage for stage in check_pipeline(pipeline)}


def errors(stage: StageReport) -> list[tuple[str, str]]:
    return [(p.id, p.field) for p in stage.report.problems if p.severity == "error"]


def test_a_file_with_stages_is_a_pipeline_and_no_other(tmp_path: Path):
    file = write(tmp_path)
    assert is_pipeline([file])
    assert not is_pipeline([tmp_path / "base.yaml"])
    assert not is_pipeline([tmp_path / "nowhere.yaml"])


def test_a_stage_has_the_shared_keys_its_file_and_its_own(tmp_path: Path):
    stages = checked(read(tmp_path))
    sft, rl = stages["sft"].report, stages["rl"].report
    assert (sft.config.trainer.seed, rl.config.trainer.seed) == (3, 3)
    assert (sft.config.trainer.stage, rl.config.trainer.stage) == ("sft", "rl")
    assert rl.config.trainer.total_training_steps == 9
    assert (rl.config.trainer.project_name, rl.config.trainer.experiment_name) == ("demo", "rl")
    assert errors(stages["sft"]) == errors(stages["rl"]) == []


def test_every_key_knows_its_line(tmp_path: Path):
    rl = read(tmp_path).stages[1]
    assert rl.tree.origins[f"{MODEL}.path"].line == 21
    assert rl.tree.origins["trainer.seed"].line == 3
    assert rl.tree.origins["trainer.total_training_steps"].source.endswith("base.yaml")


def test_overrides_are_for_all_stages_or_for_one(tmp_path: Path):
    words = ["trainer.seed=5", "rl.trainer.seed=6", "rl.trainer.total_training_steps=2"]
    stages = checked(read(tmp_path, TEXT, *words))
    assert stages["sft"].report.config.trainer.seed == 5
    assert stages["rl"].report.config.trainer.seed == 6
    assert stages["rl"].report.config.trainer.total_training_steps == 2
    assert stages["sft"].report.config.trainer.total_training_steps == 4


def test_a_stage_may_be_called_like_a_block(tmp_path: Path):
    text = TEXT.replace("name: rl", "name: critic").replace("artifact:sft", "builtin://arithmetic")
    words = ["critic.trainer.seed=6", "critic.optim.lr=0.005"]
    stages = checked(read(tmp_path, text, *words))
    assert [s.report.config.trainer.seed for s in stages.values()] == [3, 6]
    assert [s.report.config.critic.optim.lr for s in stages.values()] == [0.005, 0.005]


def test_what_is_not_made_yet_has_the_shape_of_what_it_is_made_from(tmp_path: Path):
    stages = checked(read(tmp_path))
    shapes = [stage.report.plan.shape for stage in stages.values()]
    assert shapes[0] is not None
    assert shapes[0] == shapes[1]
    assert shapes[0].layers == 7


@pytest.mark.parametrize(
    ("before", "after", "field", "why"),
    [
        ("  - name: rl\n", "  - name: sft\n", "stages.name", "two stages"),
        ("  - name: rl\n", "  - name: r/l\n", "stages.name", "letters"),
        ("  - name: rl\n    file", "  - file", "stages.name", "has a name"),
        ("    file: base.yaml\n", "    files: base.yaml\n", "stages.files", "no such key"),
        ("    file: base.yaml\n", "    file: 7\n", "stages.file", "names YAML files"),
        ("name: demo\n", "nome: demo\n", "nome", "no such key"),
        ("{seed: 3}", "{experiment_name: x}", "defaults.trainer.experiment_name", "one run dir"),
        ("  - name: rl\n", "  - only\n  - name: rl\n", "stages", "a list of stages"),
    ],
)
def test_a_pipeline_that_is_not_one_is_told_so(
    before: str, after: str, field: str, why: str, tmp_path: Path
):
    found = read(tmp_path, TEXT.replace(before, after))
    assert found.stages == ()
    assert any(p.field == field and why in p.why and p.id == "C014" for p in found.problems)


def test_broken_yaml_names_its_line(tmp_path: Path):
    file = write(tmp_path, "stages: [\n")
    assert not is_pipeline([file])
    assert check([file]).problems[0].id == "C001"


def test_a_pipeline_is_given_alone(tmp_path: Path):
    file = write(tmp_path)
    found = read_pipeline([file, tmp_path / "base.yaml"], [])
    assert ["given alone" in p.why for p in found.problems] == [True]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("artifact:sfd", "no stage of this name"),
        ("artifact:rl", "does not come before"),
        ("artifact:sft/checkpoint", "what a run is resumed from"),
        ("artifact:sft/weights", "has no `weights`"),
        ("artifact:sft@0123abcd", "no run below"),
    ],
)
def test_an_artifact_that_cannot_be_is_a_problem(named: str, why: str, tmp_path: Path):
    text = TEXT.replace("artifact:sft", named)
    stage = checked(read(tmp_path, text, f"trainer.default_local_dir={tmp_path}"))["rl"]
    [found] = [p for p in stage.report.problems if p.id == "C013"]
    assert found.field == f"{MODEL}.path"
    assert why in found.why
    assert found.origin.line == 21


def test_a_policy_is_no_reward_model(tmp_path: Path):
    words = "rl.reward.reward_model={enable: true, model_path: 'artifact:sft'}"
    stage = checked(read(tmp_path, TEXT, words))["rl"]
    assert ("C013", "reward.reward_model.model_path") in errors(stage)


def test_a_checkpoint_that_will_be_there_can_be_resumed_from(tmp_path: Path):
    words = "rl.trainer={resume_mode: path, resume_from_path: 'artifact:sft/checkpoint'}"
    assert errors(checked(read(tmp_path, TEXT, words))["rl"]) == []


def test_two_stages_cannot_share_a_run_directory(tmp_path: Path):
    stages = checked(read(tmp_path, TEXT, "trainer.experiment_name=same"))
    assert errors(stages["sft"]) == []
    assert errors(stages["rl"]) == [("C014", "trainer.experiment_name")]


def test_an_error_of_a_later_stage_is_found_at_once(tmp_path: Path):
    text = TEXT.replace("rollout: {n: 4}", "rollout: {nn: 4}")
    assert errors(checked(read(tmp_path, text))["rl"]) == [("C005", "actor_rollout_ref.rollout.nn")]


def test_artifacts_are_found_in_lists_and_replaced_there():
    values = {"data": {"train_files": ["a.jsonl", "artifact:b@012345"]}, "x": "artifact:c"}
    tree = ConfigTree(values=values, origins={})
    assert refs_in(tree) == {"data.train_files.1": "b@012345", "x": "c"}
    whole = with_paths(tree, {"data.train_files.1": "/b", "x": "/c"})
    assert whole.values == {"data": {"train_files": ["a.jsonl", "/b"]}, "x": "/c"}
    assert tree.values["x"] == "artifact:c"


def test_a_plain_run_may_name_an_artifact_too(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    run = RunDirectory.create(tmp_path / "p" / "e", config="", provenance={}, manifest={})
    files = hash_files(rows)
    made = Artifact(
        kind="dataset", name="rows", hash=hash_of(files), path=str(rows), run="r", files=files
    )
    note(run, [made], tmp_path)
    words = [f"data.train_files=['artifact:{made.title}']", f"trainer.default_local_dir={tmp_path}"]
    assert check([], words).config.data.train_files == (str(rows),)
    assert with_artifacts(load([], words)).problems == ()
    wrong = check([], [words[0].replace("rows@", "rowz@"), words[1]])
    assert ("C013", "data.train_files.0") in [(p.id, p.field) for p in wrong.problems]
