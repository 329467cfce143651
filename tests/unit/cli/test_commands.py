"""The commands as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen import __version__
from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.config.machine import Machine

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")


def luyen(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_a_sound_configuration_exits_with_0_and_shows_the_plan() -> None:
    code, text = luyen("check", QUICKSTART)
    assert code == 0
    for word in ("No problems", "rollouts", "optimizer steps", "Roles", "Memory", "fits"):
        assert word in text


def test_errors_exit_with_1_and_name_file_line_reason_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer:\n  nnodez: 2\n")
    code, text = luyen("check", QUICKSTART, str(path))
    assert code == 1
    assert f"trainer.nnodez = 2   ({path}:2)" in text
    assert "Fix: did you mean `trainer.nnodes`?" in text


def test_warnings_alone_exit_with_0() -> None:
    code, text = luyen("check", QUICKSTART, "algorithm.lam=0.9")
    assert code == 0
    assert "warning A07" in text


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        (None, "", "No such file or directory"),
        ("data: [1,\n  a: b: c\n", ":2", "not valid YAML"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train", "profile"])
def test_a_file_that_cannot_be_read_is_named_and_no_plan_is_made_up(
    command: str, text: str | None, where: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    code, said = luyen(command, str(path))
    assert code == 1
    assert f"  {path}{where}\n" in said
    assert why in said
    assert "Fix: " in said
    assert "Plan" not in said


@pytest.mark.parametrize("command", ["train", "profile"])
@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("trainer.nnodez=2", "did you mean `trainer.nnodes`?"),
        ("actor_rollout_ref.model.path=/no/such/model", "give a model directory"),
    ],
)
def test_a_run_that_does_not_start_says_why_and_shows_no_plan(
    command: str, word: str, fix: str
) -> None:
    code, said = luyen(command, QUICKSTART, word)
    assert code == 1
    assert f"Fix: {fix}" in said
    assert "Plan" not in said


def test_json_holds_the_same_report() -> None:
    code, text = luyen("check", QUICKSTART, "trainer.nnodez=2", "--json")
    report = json.loads(text)
    assert code == 1
    assert not report["ok"]
    assert [p["id"] for p in report["problems"]] == ["C005"]
    assert report["plan"]["batch"]["rollouts"] == 512
    assert report["plan"]["memory"]["fits"] is True
    assert report["config"]["actor_rollout_ref"]["rollout"]["n"] == 8


def test_the_plan_can_be_made_for_another_device() -> None:
    _, text = luyen("check", QUICKSTART, "--device-memory-gb", "80", "--json")
    report = json.loads(text)
    assert report["plan"]["placement"]["device"] == "cuda"
    assert report["plan"]["memory"]["device_bytes"] == 80 * 1024**3


def test_explain_and_schema_print_what_they_promise() -> None:
    assert luyen("explain", "rollout.n")[1].startswith("actor_rollout_ref.rollout.n")
    assert json.loads(luyen("schema")[1])["title"] == "RunConfig"
    assert luyen("schema", "--markdown")[1] == (ROOT / "docs" / "config.md").read_text()


def test_a_users_error_is_one_line_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "luyen", "explain", "rollout.nn"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: KEY = 'rollout.nn'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["check", QUICKSTART], ["explain", "rollout.n"], ["schema"]])
def test_no_command_here_loads_torch_or_transformers(command: list[str]) -> None:
    code = (
        "import sys\nfrom luyen.cli.main import app\n"
        f"try: app({command!r})\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_json_is_json_whatever_was_written(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(
        "data: {max_prompt_length: .nan, train_batch_size: 2026-01-01}\n"
        "trainer: {nnodes: .inf, project_name: !!set {a}, experiment_name: !!binary aGk=}\n"
        "actor_rollout_ref: {model: {override_config: {x: .nan, 1: [.inf]}}}\n"
    )

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    code, text = luyen("check", QUICKSTART, str(path), "--json")
    report = json.loads(text, parse_constant=refuse)
    values = {problem["field"]: problem["value"] for problem in report["problems"]}
    assert code == 1
    assert values["data.max_prompt_length"] == "nan"
    assert values["data.train_batch_size"] == "2026-01-01"
    assert values["trainer.nnodes"] == "inf"


def test_a_long_override_is_not_taken_for_a_file() -> None:
    files = ", ".join(f"part-{i:05d}.parquet" for i in range(30))
    code, text = luyen("check", QUICKSTART, f"data.val_files=[{files}]")
    assert code == 1
    assert "part-00029.parquet: no such file" in text


@pytest.mark.parametrize("size", ["0", "-5", "nan", "inf"])
def test_a_device_has_some_memory(size: str) -> None:
    with pytest.raises(UserError, match="--device-memory-gb"):
        CliRunner().invoke(
            app, ["check", QUICKSTART, "--device-memory-gb", size], catch_exceptions=False
        )


def test_the_version_is_an_option_too():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"{__version__}\n")


def test_a_plan_for_other_gpus_does_not_claim_that_they_are_here():
    words = ["check", QUICKSTART, "--device-memory-gb", "80", "trainer.device=cuda"]
    said = CliRunner().invoke(app, words).output
    assert "as if with GPUs of 80 GiB" in said
    assert "64 GPU" not in said
    assert Machine(cpus=2, ram_bytes=2**34, gpu_bytes=(1, 1)).words().endswith("2 GPUs")
