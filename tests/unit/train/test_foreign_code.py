"""Code of others in a run: it cannot change rows, and cannot end the run without a word."""

import json
import sys
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.cli import main
from luyen.train.builders.setup import import_plugins
from tests.runs import Ran, train

ONE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, weights):
    extra_info["row"]["seen"].append(1)
    weights["letters"][0] += 1
    found = len(solution_str) + len(extra_info["row"]["seen"]) + weights["letters"][0]
    return float(found)
"""
MANY = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, weights):
    weights["letters"][0] += 1
    for info in extra_infos:
        info["row"]["seen"].append(1)
    pairs = zip(solution_strs, extra_infos)
    return [len(s) + len(info["row"]["seen"]) + weights["letters"][0] for s, info in pairs]
"""
KWARGS = "reward.custom_reward_function.reward_kwargs={weights: {letters: [0]}}"


def chain(ran: Ran) -> list[str]:
    return [line.chain for line in read_digests(ran.root / "digests.jsonl")]


@pytest.mark.parametrize(("manager", "code"), [("naive", ONE), ("batch", MANY)])
def test_a_reward_that_changes_its_arguments_gives_the_same_chain_resumed_and_whole(
    tmp_path: Path, manager: str, code: str
):
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "reward.py"
    step_report = [{"prompt": f"{i}+1=", "extra_info": {"row": {"seen": []}}} for i in range(4)]
    rows.write_text(
        "".join(json.dumps({**row, "data_source": "mine"}) + "\n" for row in step_report)
    )
    reward.write_text(code)
    words = (
        f"data.train_files={rows}",
        "data.string_prompts=user",
        f"reward.custom_reward_function.path={reward}",
        f"reward.reward_manager.name={manager}",
        KWARGS,
        "trainer.save_freq=2",
    )
    whole = train(tmp_path / "whole", *words, "trainer.total_training_steps=4")
    train(tmp_path / "parts", *words, "trainer.total_training_steps=2")
    resumed = train(tmp_path / "parts", *words, "trainer.total_training_steps=4")
    assert chain(whole) == chain(resumed)
    assert len(chain(whole)) == 4


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("class E(BaseException):\n  def __str__(self): raise SystemExit\nraise E", "E: it cannot"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_a_plugin_that_raises_is_an_error_with_its_name_and_place(tmp_path: Path, code, said):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(code)
    with pytest.raises(UserError, match=rf"importing it failed: {said}.*\(.*\)") as caught:
        import_plugins((str(plugin),))
    assert caught.value.field == "trainer.plugins"


@pytest.mark.parametrize("code", [0, None, "enough", 3])
def test_a_command_that_something_inside_ends_fails_with_a_message(monkeypatch, capsys, code):
    def leaves(words: list[str], **_: object) -> int:
        sys.exit(code)

    monkeypatch.setattr("luyen.cli.train.run_train", leaves)
    monkeypatch.setattr(sys, "argv", ["luyen", "train"])
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == 1
    assert "code inside the command ended it: SystemExit" in capsys.readouterr().err


def test_commands_still_choose_their_own_exit_codes(monkeypatch):
    for number in (0, 1, 2):
        monkeypatch.setattr("luyen.cli.train.run_train", lambda words, n=number, **_: n)
        monkeypatch.setattr(sys, "argv", ["luyen", "train"])
        with pytest.raises(SystemExit) as caught:
            main.run()
        assert caught.value.code == number
