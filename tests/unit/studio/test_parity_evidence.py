"""The finding about a parity gap names what it is made of and the worst tokens of the run."""

from pathlib import Path

from luyen.base.digests import page_with_checksum
from luyen.base.rundir import RunDirectory
from luyen.studio.doctor.record import read_run
from luyen.train.metrics import WorstToken
from tests.unit.studio.run_files import seen, write_run

COURSES = {
    "parity/mean_gap": [0.1] * 5,
    "parity/max_gap": [3.0] * 5,
    "parity/engine_share": [0.25] * 5,
    "parity/staleness_share": [0.75] * 5,
}


def written(root: Path, step: int, rollout: str) -> Path:
    token = WorstToken(
        rollout=rollout, branch=0, position=7, token=5, text="4", version=3, trainer=-4.0,
        sampler=-1.0, kept_mass=None, part="staleness",
    )  # fmt: skip
    path = RunDirectory(root).parity(step)
    path.parent.mkdir(exist_ok=True)
    page = {"schema": 1, "step": step, "tokens": [token.as_json()]}
    path.write_text(page_with_checksum(page))
    return path


def test_the_latest_worst_token_and_the_shares_are_evidence(tmp_path: Path):
    root = write_run(tmp_path / "run", COURSES)
    written(root, 4, "4.0.a/1")
    written(root, 5, "5.2.b/0")
    [symptom] = seen(root, "parity-gap")
    assert "'4' at 7 of 5.2.b/0, -4 for -1 (staleness)" in symptom.says
    assert symptom.rollouts == ("5.2.b/0",)
    assert symptom.numbers["parity/staleness_share"] == 0.75


def test_a_run_without_such_files_has_the_finding_all_the_same(tmp_path: Path):
    [symptom] = seen(write_run(tmp_path / "run", COURSES), "parity-gap")
    assert symptom.rollouts == ()
    assert symptom.says.endswith("at worst")


def test_a_damaged_file_is_noted_and_passed_over(tmp_path: Path):
    root = write_run(tmp_path / "run", COURSES)
    path = written(root, 5, "5.2.b/0")
    path.write_text(path.read_text().replace("5.2.b/0", "5.2.c/0"))
    [symptom] = seen(root, "parity-gap")
    assert symptom.rollouts == ()
    assert [u.file for u in read_run(root).damaged()] == ["parity/step_000005.json"]


def test_older_weights_are_no_fault_of_the_engine(tmp_path: Path):
    """Only tokens of the very weights that learn can tell whether the two sides compute alike."""
    ahead = "{trainer: {max_staleness: 1}}"
    courses = {**COURSES, "parity/engine_mean": [0.001], "parity/engine_max": [0.01]}
    assert seen(write_run(tmp_path / "sound", courses, config=ahead), "parity-gap") == []
    assert seen(write_run(tmp_path / "unknown", COURSES, config=ahead), "parity-gap") == []
    courses["parity/engine_mean"] = [0.2]
    [symptom] = seen(write_run(tmp_path / "off", courses, config=ahead), "parity-gap")
    assert symptom.numbers["parity/engine_mean"] == 0.2
