"""How many source files one local single-turn step touches, followed call by call."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import luyen
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from tests.runs import close, prepare

ROOT = f"{Path(luyen.__file__).parent}/"
FOUNDATIONS = {"base", "telemetry", "config"}
"""What every layer stands on: files, records, digests, logs, settings."""
MOST, MOST_ABOVE = 78, 57
"""All files, and those above the foundations. The aim is 40; these go down, but for a new part of
the step. `docs/architecture.md` says what the rest is."""


def test_a_step_touches_no_more_files_than_before(tmp_path: Path, monkeypatch):
    touched = Counter[str]()

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            touched[frame.f_code.co_filename.removeprefix(ROOT)] += 1

    def trace(profile: Any) -> None:
        sys.setprofile(profile)
        threading.setprofile(profile)

    def followed(run: OnlineRun) -> Iterator[int]:
        for step in steps(run):
            trace(follow if step == 2 else None)
            yield step
            trace(None)

    steps = OnlineRun.steps
    monkeypatch.setattr(OnlineRun, "steps", followed)
    run = prepare(tmp_path, "trainer.total_training_steps=3", "trainer.save_freq=-1")
    try:
        train_online(run)
    finally:
        trace(None)
        close(run)
    above = {file for file in touched if file.partition("/")[0] not in FOUNDATIONS}
    assert {"train/loop.py", "runtime/roles.py", "rollout/native/engine.py"} <= above
    assert len(touched) <= MOST, sorted(touched)
    assert len(above) <= MOST_ABOVE, sorted(above)
