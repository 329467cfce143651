"""What `check` says of the definition of a reward function, and that scoring says the same."""

from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.plugins import arguments_of
from luyen.rewards.custom import ONE, check_signature
from luyen.rewards.user_functions import is_trl, load_function

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
FIELD = "reward.custom_reward_function"
DEFINITIONS = {
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...": True,
    "def compute_score(data_source, solution_str, ground_truth, extra_info): ...": True,
    "def compute_score(solution_str, **row): ...": True,
    "def compute_score(**row): ...": True,
    "async def compute_score(data_source, solution_str, ground_truth, extra_info): ...": True,
    "def compute_score(*, data_source, solution_str, ground_truth, extra_info, k=1): ...": True,
    "def compute_score(completions, **columns): ...": True,
    "def compute_score(completions, answer): ...": True,
    "def compute_score(solution_str): ...": False,
    "def compute_score(solution_str, ground_truth): ...": False,
    "def compute_score(answer, **row): ...": False,
    "def compute_score(data_source, solution_str, ground_truth, extra_info, more): ...": False,
    "def compute_score(*, answer, **row): ...": False,
    "def compute_score(solution_str, /, **row): ...": False,
    "def compute_score(*row): ...": False,
    "def compute_score(): ...": False,
}


def problems(folder: Path, text: str, *words: str) -> list[tuple[str, str]]:
    file = folder / "reward.py"
    file.write_text(f"{text}\n")
    given = ["data.train_files=arithmetic://sum", f"{FIELD}.path={file}", *words]
    report = check([], given, machine=LAPTOP)
    return [(p.id, str(p.field)) for p in report.problems if p.severity == "error"]


@pytest.mark.parametrize(("text", "fits"), DEFINITIONS.items())
def test_check_and_scoring_agree_on_a_definition(text: str, fits: bool, tmp_path: Path):
    assert problems(tmp_path, text) == ([] if fits else [("D05", f"{FIELD}.name")])
    path = str(tmp_path / "reward.py")
    if fits and is_trl(load_function(path, "compute_score", field=FIELD)):
        return
    if fits:
        check_signature(path, "compute_score", ONE)
    else:
        with pytest.raises(UserError, match="other arguments"):
            check_signature(path, "compute_score", ONE)


def test_a_function_may_be_imported_by_its_file(tmp_path: Path):
    """`check` imports nothing: it takes the import's word for it."""
    assert problems(tmp_path, "from mine import compute_score") == []
    assert problems(tmp_path, "from mine import score as compute_score") == []
    assert problems(tmp_path, "from mine import score") == [("D05", f"{FIELD}.name")]


def test_arguments_of_the_configuration_are_given_too(tmp_path: Path):
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info, scale): ..."
    assert problems(tmp_path, text) == [("D05", f"{FIELD}.name")]
    assert problems(tmp_path, text, f"{FIELD}.reward_kwargs={{scale: 2}}") == []
    wrong = problems(tmp_path, text, f"{FIELD}.reward_kwargs={{scale: 2, skale: 3}}")
    assert wrong == [("D05", f"{FIELD}.reward_kwargs")]


@pytest.mark.parametrize("text", ["completions, answer", "**lists"])
def test_the_manager_of_lists_takes_the_functions_that_it_can_call(text: str, tmp_path: Path):
    batch = "reward.reward_manager.name=batch"
    assert problems(tmp_path, f"def compute_score({text}): ...", batch) == []
    ours = "def compute_score(data_source, solution_str, ground_truth, extra_info): ..."
    assert problems(tmp_path, ours, batch) == [("W11", "reward.reward_manager.name")]


def test_a_stage_without_rewards_does_not_ask_for_the_file():
    words = ["trainer.stage=sft", "data.train_files=arithmetic://sum?traces=1"]
    report = check([], [*words, f"{FIELD}.path=/nowhere.py"], machine=LAPTOP)
    assert [(p.id, p.severity) for p in report.problems if FIELD in str(p.field)] == [
        ("Y10", "note")
    ]


def test_a_definition_is_read_without_importing_it(tmp_path: Path):
    file = tmp_path / "reward.py"
    file.write_text("raise SystemExit\n\n\ndef f(a, /, b, c=1, *, d, e=2, **more): ...\n")
    found = arguments_of(str(file), "f")
    assert found is not None
    assert (found.names, found.required) == (("b", "c", "d", "e"), ("", "b", "d"))
    assert found.has_more


def test_a_policy_is_no_reward_model(tmp_path: Path):
    model = "reward.reward_model.model_path"
    words = ["data.train_files=arithmetic://sum", "reward.reward_model.enable=true"]
    words.append("reward.components={a: {model: reward_model}}")

    def fields(path: str) -> list[str]:
        report = check([], [*words, f"{model}={path}"], machine=LAPTOP)
        return [p.why for p in report.problems if p.id == "D07"]

    assert fields("builtin://arithmetic") == ["it is no reward model but LlamaForCausalLM"]
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    assert fields(str(tmp_path)) == []
    config.write_text('{"architectures": "LlamaForCausalLM"}')
    assert fields(str(tmp_path)) == [], "no list of names: nothing is known"
