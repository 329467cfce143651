"""`luyen diff` on directories made by hand: verdicts, exit codes, files that are missing."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen.base.digests import BEGINNING, STAGES, DigestFile, hash_value, link
from luyen.base.rundir import RunDirectory
from luyen.cli.main import app
from luyen.studio.runs import missing_parts

MANIFEST = {"versions": {"torch": "2.13.0"}, "datasets": {"train": "ab"}}


def run(
    folder: Path, *, odd: Mapping[int, str] | None = None, steps: int = 3, previous: str = BEGINNING
) -> Path:
    """A run with digests of steps; `odd` names the stage of a step that is not as elsewhere."""
    made = RunDirectory.create(
        folder, config="trainer: {seed: 0}", provenance={}, manifest=MANIFEST
    )
    file, chain = DigestFile(made.digests), previous
    for step in range(1, steps + 1):
        changed = (odd or {}).get(step)
        stages = {name: hash_value([step, name, name == changed]) for name in STAGES}
        digest = link(chain, step=step, stages=stages)
        file.write(digest)
        chain = digest.chain
    file.close()
    made.metrics.write_text(
        "".join(json.dumps({"step": s, "a": float(s in (odd or {}))}) + "\n" for s in range(1, 4))
    )
    return made.root


def diff(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diff", *map(str, words)])
    return done.exit_code, done.output


def test_equal_runs_give_0(tmp_path: Path):
    code, said = diff(run(tmp_path / "a"), run(tmp_path / "b"))
    assert code == 0
    assert "Equal in all 3 steps that both have (1 to 3)." in said


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_step_and_stage_are_named(stage: str, tmp_path: Path):
    code, said = diff(run(tmp_path / "a"), run(tmp_path / "b", odd={2: stage, 3: "prompts"}))
    assert code == 1
    assert f"They part at step 2, in its {stage}." in said
    assert f"different: {stage}\n" in said
    assert "a: 0.0 -> 1.0" in said
    assert "nothing that is recorded" in said


def test_rollouts_that_are_not_there_are_noted(tmp_path: Path):
    code, said = diff(run(tmp_path / "a"), run(tmp_path / "b", odd={2: "rollouts"}))
    assert code == 1
    assert "note: the rollouts of step 2 cannot be compared" in said


def test_a_chain_that_is_broken_is_noted(tmp_path: Path):
    one, other = run(tmp_path / "a"), run(tmp_path / "b")
    lines = (other / "digests.jsonl").read_text().splitlines(keepends=True)
    (other / "digests.jsonl").write_text(lines[0] + lines[2])
    code, said = diff(one, other)
    assert code == 1
    assert "Only A has step 2." in said
    assert "step 3 does not continue the chain of step 1" in said


def test_the_same_as_data(tmp_path: Path):
    code, said = diff(run(tmp_path / "a"), run(tmp_path / "b", odd={3: "weights"}), "--json")
    page = json.loads(said)
    assert code == 1
    assert page["parting"] == {"step": 3, "stages": ["weights"]}
    assert (page["equal"], page["stage"], page["common"]) == (False, "weights", [1, 2, 3])


def test_what_cannot_be_compared_gives_2(tmp_path: Path):
    one, other = run(tmp_path / "a"), run(tmp_path / "b")
    code, said = diff(one, tmp_path)
    assert (code, "no manifest.json" in said) == (2, True)
    (other / "digests.jsonl").unlink()
    code, said = diff(one, other)
    assert (code, "digests.jsonl" in said, "Traceback" in said) == (2, True, False)
    (other / "digests.jsonl").write_text("")
    code, said = diff(one, other)
    assert (code, "no step in common" in said) == (2, True)
    (other / "digests.jsonl").write_text("{}\n")
    code, said = diff(one, other)
    assert (code, "line 1" in said) == (2, True)


def test_rollouts_of_the_last_step_may_be_unwritten(tmp_path: Path):
    """A thread writes them: a run that goes on, or was killed, may have the digest alone."""
    made = RunDirectory(run(tmp_path / "a"))
    made.rollouts(1).parent.mkdir(exist_ok=True)
    made.rollouts(1).touch()
    made.rollouts(2).touch()
    assert missing_parts(made) == []
    made.rollouts(2).unlink()
    [gone] = missing_parts(made)
    assert (gone.path.name, "more" in gone.why) == ("step_000002.parquet", False)
