"""`luyen reproduce`: equal runs, changed inputs that are named before anything runs, and partings.

The second run is a process of its own, so each of these takes some seconds.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from luyen.base.digests import page_with_checksum
from luyen.base.files import read_json
from luyen.base.rundir import RunDirectory
from luyen.cli.diff import lines
from luyen.studio.diff import compare_runs
from tests import runs
from tests.e2e.tiny import luyen
from tests.forked_python import forked_executable

SHARES = Path(runs.__file__).parent / "shares_reward.py"


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(SHARES, tmp_path_factory.mktemp("code") / "reward.py"))


@pytest.fixture(scope="module")
def run(reward: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    return runs.train(place, f"reward.custom_reward_function.path={reward}").root


def copied(run: Path, place: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(run, place / "project" / "copy"))


def test_a_run_is_reproduced_to_the_last_bit(run: Path, tmp_path: Path):
    into = tmp_path / "p" / "again"
    done = luyen("reproduce", run, "--into", into, "--json")
    page = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert (page["equal"], page["equal_steps"], page["difference"]) == (True, [1, 2], None)
    assert "step 2 of 2: equal" in done.stderr
    assert compare_runs(run, into).parting is None
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["again"]
    refused = luyen("reproduce", run, "--into", into)
    assert (refused.exit_code, "nothing is written over" in refused.output) == (2, True)


@pytest.fixture
def _forked() -> Iterator[None]:
    """The second run is a fork of a process that has everything imported."""
    with forked_executable():
        yield


@pytest.mark.usefixtures("_forked")
def test_a_changed_seed_parts_at_the_first_step(run: Path, tmp_path: Path):
    copy = copied(run, tmp_path)
    config = yaml.safe_load(copy.read_config())
    config["trainer"]["seed"] = 1
    copy.write_config(yaml.safe_dump(config), {})
    done = luyen("reproduce", copy.root, "--steps", "1", "--trust")
    assert done.exit_code == 1, done.output
    assert "step 1 of 1: not equal" in done.output
    assert "They part at step 1, in its prompts." in done.output
    assert "seeds.run: 0 -> 1" in done.output
    assert "most likely seeds.run" in done.output
    assert (copy.root.parent / "copy-reproduced").is_dir()


def test_a_changed_reward_file_is_named_before_anything_runs(
    run: Path, reward: Path, tmp_path: Path
):
    before = reward.read_text()
    reward.write_text(f"{before}\n# a thought\n")
    try:
        done = luyen("reproduce", run, "--trust", "--into", tmp_path / "p" / "again")
    finally:
        reward.write_text(before)
    assert done.exit_code == 2
    assert "content of reward.custom_reward_function.path" in done.output
    assert "its content is not what the run had" in done.output
    assert not (tmp_path / "p").exists()


def test_changed_rows_are_named_and_nothing_is_left(run: Path, tmp_path: Path):
    copy = copied(run, tmp_path)
    facts = copy.read_manifest()
    facts["datasets"]["train"] = "other"
    copy.manifest.write_text(page_with_checksum(facts))
    done = luyen("reproduce", copy.root, "--trust")
    assert done.exit_code == 2
    assert "the rows are not what the run had" in done.output
    assert [p.name for p in copy.root.parent.iterdir()] == ["copy"]


def test_a_damaged_run_and_one_that_cannot_start_are_explained(run: Path, tmp_path: Path):
    copy = copied(run, tmp_path)
    text = copy.config.read_text()
    copy.config.write_text(text.replace("seed: 0", "seed: 1"))
    done = luyen("reproduce", copy.root, "--trust")
    assert (done.exit_code, "config.yaml" in done.output) == (2, True)
    config = yaml.safe_load(text)
    config["data"]["train_files"] = ["nowhere.jsonl"]
    copy.write_config(yaml.safe_dump(config), {})
    done = luyen("reproduce", copy.root, "--trust")
    assert (done.exit_code, "nowhere.jsonl: no such file" in done.output) == (2, True)
    copy.digests.unlink()
    done = luyen("reproduce", copy.root, "--trust")
    assert (done.exit_code, "digests.jsonl" in done.output) == (2, True)


def test_diff_names_the_reward_file_that_changed(run: Path, reward: Path, tmp_path: Path):
    before = reward.read_text()
    reward.write_text(before.replace("def compute_score", "HALF = 0.5\n\n\ndef compute_score"))
    try:
        other = runs.train(tmp_path, f"reward.custom_reward_function.path={reward}").root
    finally:
        reward.write_text(before)
    found = compare_runs(run, other)
    assert [one.name for one in found.inputs] == ["reward.custom_reward_function.path"]
    assert found.inputs[0].acts_on == "rewards"
    assert "content of reward.custom_reward_function.path" in "\n".join(lines(found))


def test_a_resumption_is_noted_with_what_changed(run: Path, tmp_path: Path):
    copy = copied(run, tmp_path)
    assert copy.read_resumptions() == []
    words = ("trainer.project_name=project", "trainer.experiment_name=copy")
    # The reward is the file of the tests again, without a change in what it says.
    runs.close(runs.prepare(tmp_path, *words, "trainer.total_training_steps=3"))
    (entry,) = copy.read_resumptions()
    assert (entry["checkpoint"], entry["is_config_new"]) == (2, True)
    assert "files" in entry["changed"], "the path of the reward is another"
    assert read_json(copy.manifest)["run_id"] == copy.run_id
