"""Runs that hang in a process of their own: what is said, what is saved, and how they go on."""

import os
import subprocess
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.checkpoint.store import CheckpointStore
from tests.forked_python import forked_python
from tests.runs import CHATTY, ROLLOUT, TURNS, train

HERE = Path(__file__).parent.parent
PROGRAM = """
import sys
from pathlib import Path
from luyen.train.start import run_training
from tests.runs import report_of
report = report_of(Path(sys.argv[1]), *sys.argv[2:])
assert report.is_sound, report.problems
run_training(report)
"""
STEPS = ("trainer.total_training_steps=3",)
REWARD = (*STEPS, f"reward.custom_reward_function.path={HERE / 'hanging.py'}")
TOOL = (*STEPS, *CHATTY, f"{TURNS}.function_tool_path={HERE / 'hanging.py'}")
PLUGIN = (*STEPS, f"trainer.plugins=[{HERE / 'hanging_plugin.py'}]")
ENGINE = (*PLUGIN, f"{ROLLOUT}.name=stuck")
STOP = "trainer.watchdog.on_hang=stop"


def watched(phase: str, seconds: float = 1.5) -> tuple[str, ...]:
    """Only this phase is watched: the others may be slow on a busy machine."""
    return ("trainer.watchdog.budget_s=0", f"trainer.watchdog.budgets={{{phase}: {seconds}}}")


def hung(folder: Path, where: str, *words: str) -> tuple[int, str]:
    """Exit code and messages of a run that hangs there."""
    done = subprocess.run(
        [forked_python(), "-c", PROGRAM, str(folder), *words],
        env=os.environ | {"LUYEN_HANG": where, "PYTHONPATH": str(HERE.parent)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def chains(root: Path) -> list[str]:
    return [line.chain for line in read_digests(root / "digests.jsonl")]


@pytest.mark.parametrize(
    ("where", "phase", "words", "named"),
    [
        ("score:40", "score", REWARD, ["sleep_for_ever", "compute_score", "thread MainThread"]),
        ("tool:30", "generate", TOOL, ["sleep_for_ever", "in echo", "\ntask ", "multi_turn.py"]),
        ("pass:14", "generate", ENGINE, ["in blocked", "thread MainThread"]),
    ],
    ids=["reward", "tool", "engine"],
)
def test_a_hang_is_described_the_last_step_is_saved_and_the_run_goes_on(
    where: str, phase: str, words: tuple[str, ...], named: list[str], tmp_path: Path
):
    code, said = hung(tmp_path / "parts", where, *words, *watched(phase), STOP)
    assert code == 75, said
    root = tmp_path / "parts" / "luyen" / "run"
    [file] = (root / "events").glob("hang-*.txt")
    step = int(file.name.split("-")[1])
    assert file.name == f"hang-{step}-{phase}.txt"
    assert step > 1
    assert not list((root / "events").glob("locked-*")), "the interpreter was never locked"
    assert f"step {step}, {phase}: nothing has moved for" in said
    assert str(file) in said
    assert f"step {step - 1} is saved" in said
    page = file.read_text()
    assert [name for name in named if name not in page] == []
    assert CheckpointStore(root / "checkpoints").latest() == step - 1
    whole = train(tmp_path / "whole", *words)
    resumed = train(tmp_path / "parts", *words)
    assert chains(resumed.root) == chains(whole.root)


def test_a_hang_in_the_update_leaves_the_newest_checkpoint(tmp_path: Path):
    words = (*PLUGIN, "trainer.save_freq=1")
    code, said = hung(tmp_path, "update:2", *words, *watched("update"), STOP)
    assert code == 75, said
    assert "the weights are being changed, so that the newest checkpoint stays" in said
    root = tmp_path / "luyen" / "run"
    assert "in stepped" in (root / "events" / "hang-3-update.txt").read_text()
    assert CheckpointStore(root / "checkpoints").latest() == 2
    whole = train(tmp_path / "whole", *words)
    assert chains(train(tmp_path, *words).root) == chains(whole.root)


def test_code_that_holds_the_interpreter_is_described_too(tmp_path: Path):
    code, said = hung(tmp_path, "locked:14", *ENGINE, *watched("generate", 0.8), STOP)
    assert code == 1, said
    [file] = (tmp_path / "luyen" / "run" / "events").glob("locked-*.txt")
    assert "in blocked" in file.read_text()
