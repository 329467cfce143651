"""Hundreds of wrong inputs: a check says what is wrong, soon, or training can begin with it."""

import json
import time
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.cli.check import report_json, report_lines, without_odd_values
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.pipeline import check_pipeline, is_pipeline, read_pipeline
from luyen.data.build import build_data
from luyen.data.tokenizer import load_tokenizer
from luyen.rewards.build import build_reward
from luyen.rollout.tools.tool_file import load_tools
from tests.fuzz.bad_input import PAGE, WORDS, BadInput, all_inputs, laid_out

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
TOKENIZER = load_tokenizer("builtin://tools")
SECONDS = 5.0
CASES = all_inputs()


def reports_of(case: BadInput, folder: Path) -> list[Report]:
    """What the command would say; for a pipeline, about each stage."""
    files, words = laid_out(case, folder)
    if is_pipeline(files):
        pipeline = read_pipeline(files, words)
        assert pipeline.problems or pipeline.stages
        return [stage.report for stage in check_pipeline(pipeline, machine=LAPTOP)]
    return [check(files, words, machine=LAPTOP)]


def demand_words(report: Report) -> None:
    """The report can be printed, and every problem says where, why and what to do."""
    "\n".join(report_lines(report, ["a.yaml"], LAPTOP)).encode()
    json.dumps(without_odd_values(report_json(report)), allow_nan=False)
    for problem in report.problems:
        assert problem.why
        assert problem.fix or problem.severity == "note"
        assert str(problem.origin)


def begin(report: Report) -> UserError | None:
    """Make what training makes before it loads a model; the error that it ends with, if any."""
    try:
        make(report)
    except UserError as error:
        return error
    return None


def make(report: Report) -> None:
    config = report.config
    turns = config.actor_rollout_ref.rollout.multi_turn
    if turns.enable:
        load_tools(tool_config_path=turns.tool_config_path)
    if config.trainer.stage == "rl":
        build_data(config.data, tokenizer=TOKENIZER, seed=config.trainer.seed)
        build_reward(config.reward, max_response_length=config.data.max_response_length).close()


def is_about_rows(error: UserError) -> bool:
    """A check does not read rows: what only they can tell, training says."""
    return " row " in error.field or "no row is left" in error.why or _is_in_file(error)


def _is_in_file(error: UserError) -> bool:
    return error.field == "data.train_files" and "bad.jsonl" in str(error.value)


def test_there_are_hundreds_and_each_is_another() -> None:
    assert len(CASES) >= 400
    assert len({(case.kind, case.key, case.text) for case in CASES}) >= 400


def test_what_they_are_made_from_is_sound(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(PAGE)
    for report in (check([], WORDS, machine=LAPTOP), check([tmp_path / "a.yaml"], machine=LAPTOP)):
        assert report.is_sound, report.problems
        assert begin(report) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_wrong_is_said_or_training_begins(
    case: BadInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    reports = reports_of(case, tmp_path)
    assert time.monotonic() - began < SECONDS
    for report in reports:
        demand_words(report)
    if case.kind in ("stages", "servers", "users") or not all(r.is_sound for r in reports):
        return
    refused = begin(reports[0])
    assert refused is None or is_about_rows(refused), f"check says yes, and training: {refused}"
    assert time.monotonic() - began < 2 * SECONDS
