"""Signals that the process which starts us has blocked or ignored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import TINY

START = """
import os, signal, sys
how, number = sys.argv[1], getattr(signal, sys.argv[2])
if how == "ignored":
    signal.signal(number, signal.SIG_IGN)
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
SETTLED = """
import json, signal, subprocess, sys
from luyen.base.system import reset_signals
reset_signals()
failed = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode
print(json.dumps([failed, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))]))
"""
JUDGED = """
import asyncio, json
from luyen.sandbox.launch import Limits
from luyen.sandbox.python import run_python
from luyen.sandbox.verify import verify
verdict = asyncio.run(verify("def f(x): return 2 * x", ["assert f(2) == 4"]))
spin = asyncio.run(run_python("while True: pass", limits=Limits(cpu_s=1, wall_s=60.0)))
print(json.dumps([verdict.passed, spin.killed_for]))
"""


def started(how: str, number: str, code: str) -> list[object]:
    words = [sys.executable, "-c", START, how, number, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("number", ["SIGCHLD", "SIGTERM", "SIGXCPU"])
def test_blocked_signals_are_unblocked(number: str):
    assert started("blocked", number, SETTLED) == [3, []]


def test_exit_codes_of_children_are_read_where_sigchld_was_ignored():
    assert started("ignored", "SIGCHLD", SETTLED) == [3, []]


@pytest.mark.parametrize(
    ("how", "number"), [("ignored", "SIGCHLD"), ("ignored", "SIGXCPU"), ("blocked", "SIGXCPU")]
)
def test_verdicts_do_not_depend_on_inherited_signals(how: str, number: str):
    assert started(how, number, JUDGED) == [1, "cpu"]


def test_a_sweep_whose_run_failed_says_so_where_sigchld_was_ignored(tmp_path: Path):
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs):\n    raise RuntimeError('no')\n")
    mine = (f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=broken")
    function = f"reward.custom_reward_function.path={reward}"
    sweep = ["-m", "luyen", "sweep", "recipes/quickstart.yaml", *TINY, *mine, function]
    words = [sys.executable, "-c", START, "ignored", "SIGCHLD", *sweep, "--run", "trainer.seed=1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "scores could not be computed" in done.stderr
