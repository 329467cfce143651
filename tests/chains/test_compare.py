"""`tests.chains.compare` says which runs two trees train differently, and where."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.tree import ROOT
from tests.chains.compare import main
from tests.chains.differences import first_difference

LOSS, OTHER_LOSS = "return -advantages * capped", "return -1.0000001 * advantages * capped"
"""A change of the clipped surrogate by one unit in the last place of fp32."""


def test_a_change_of_the_policy_loss_is_found_and_what_it_does_not_touch_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    new = tmp_path / "new"
    shutil.copytree(ROOT / "src", new / "src", ignore=shutil.ignore_patterns("__pycache__"))
    files = (new / "src" / "luyen" / "algorithms").rglob("*.py")
    (changed,) = (path for path in files if LOSS in path.read_text())
    changed.write_text(changed.read_text().replace(LOSS, OTHER_LOSS))
    assert main([str(ROOT), str(new), "quickstart", "SFT"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("quickstart ")
    assert "DIFFERENT: quickstart, step 1: digest of gradients: old " in first
    assert second.startswith("SFT ")
    assert second.endswith(" equal")
    assert last.startswith("1 of 2 runs are equal")


def test_a_folder_without_recipes_and_an_unknown_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), str(ROOT)])
    assert "it has no recipes/" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(ROOT), str(ROOT), "quickstrat"])
    assert "no such run: ['quickstrat']" in capsys.readouterr().err


def test_a_tree_whose_package_is_not_found_is_refused(tmp_path: Path):
    with pytest.raises(SystemExit, match="not a package below"):
        main([str(ROOT), str(tmp_path), "SFT"])


STAGES = {"rollouts": "a" * 64, "gradients": "b" * 64, "weights": "c" * 64, "metrics": "d" * 64}
METRICS = {"reward/mean": 0.5, "actor/kl": "nan", "time/step": 1.0, "role/actor/memory_gb": 2.0}


def made(folder: Path, *, stages: dict[str, str] | None = None, **changed: Any) -> Path:
    """A folder with a run of one step; a metric that is None is left out."""
    root = folder / "runs" / "luyen" / "one"
    root.mkdir(parents=True)
    chain = {"chain": changed.pop("chain", "e" * 64), "previous": "f" * 64}
    line = {"step": 1, "stages": {**STAGES, **(stages or {})}, **chain}
    (root / "digests.jsonl").write_text(json.dumps(line) + "\n")
    metrics = {n: v for n, v in {**METRICS, **changed}.items() if v is not None}
    (root / "metrics.jsonl").write_text(json.dumps({"step": 1, "check": "x", **metrics}) + "\n")
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return made(tmp_path / "old")


def test_times_and_memory_are_not_compared_and_nan_equals_nan(old: Path, tmp_path: Path):
    times: dict[str, Any] = {"time/step": 9.0, "time/new": 1.0, "role/actor/memory_gb": 3.0}
    assert first_difference(old, made(tmp_path / "new", **times)) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"stages": {"weights": "0" * 64}},
            "digest of weights: old cccccccccccc, new 000000000000",
        ),
        ({"stages": {"more": "0" * 64}}, "digest of more: old has none, new 000000000000"),
        ({"stages": {"metrics": "0" * 64}}, f"digest of metrics: old {'d' * 64}, new {'0' * 64}"),
        ({"chain": "0" * 64}, f"chain: old {'e' * 64}, new {'0' * 64}"),
        (
            {"reward/mean": 0.5000000000000001},
            "metric reward/mean: old 0.5, new 0.5000000000000001",
        ),
        ({"reward/mean": None}, "metric reward/mean: old 0.5, new has none"),
        ({"reward/more": 1}, "metric reward/more: old has none, new 1.0"),
    ],
)
def test_the_first_difference_is_named(
    changed: dict[str, Any], said: str, old: Path, tmp_path: Path
):
    assert first_difference(old, made(tmp_path / "new", **changed)) == f"one, step 1: {said}"


def test_of_a_renamed_metric_the_value_must_be_equal(old: Path, tmp_path: Path):
    renamed = {"reward/mean": "score/mean"}
    hashed = {"gradients": "0" * 64, "metrics": "0" * 64}
    moved = {"reward/mean": None, "chain": "0" * 64}
    new = made(tmp_path / "new", stages=hashed, **moved, **{"score/mean": 0.5})
    assert first_difference(old, new, renamed) is None
    assert first_difference(old, new) is not None
    other = made(tmp_path / "other", stages=hashed, **moved, **{"score/mean": 0.25})
    assert first_difference(old, other, renamed) == (
        "one, step 1: metric score/mean: old 0.5, new 0.25"
    )
    weights = {**hashed, "weights": "0" * 64}
    other = made(tmp_path / "weights", stages=weights, **moved, **{"score/mean": 0.5})
    assert "digest of weights" in (first_difference(old, other, renamed) or "")


def test_a_step_and_a_run_directory_that_are_missing_are_named(old: Path, tmp_path: Path):
    new = made(tmp_path / "new")
    (new / "runs/luyen/one/digests.jsonl").write_text("")
    assert first_difference(old, new) == "one: steps in digests.jsonl: old [1], new []"
    assert (first_difference(old, tmp_path / "none") or "").startswith("run directories: ")
