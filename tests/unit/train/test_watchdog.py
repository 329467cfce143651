"""The watchdog beside a thread that sleeps: when it reports, how often, and what it writes."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from luyen.base.heartbeat import HEART, beat
from luyen.config.schema.trainer import WatchdogConfig as Settings
from luyen.telemetry.stacks import child_lines, describe_process
from luyen.train.monitor import PhaseWatchdog, _within


def settings(seconds: float = 0.2, **more: object) -> Settings:
    return Settings.model_validate({"budget_s": seconds, **more})


def reports(folder: Path, name: str) -> int:
    file = folder / name
    return file.read_text().count("nothing has moved for") if file.is_file() else 0


def test_a_phase_that_stands_still_is_reported_at_each_doubling(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with PhaseWatchdog(settings(0.2), tmp_path) as dog, dog.watching(3, "score"):
        time.sleep(1.1)
    # After 0.2, 0.4 and 0.8 seconds; a busy machine may miss one.
    assert 2 <= reports(tmp_path, "hang-3-score.txt") <= 3
    said = capfd.readouterr().err
    assert (
        f"step 3, score: nothing has moved for 0.2 s; what every thread is doing is in {tmp_path}"
        in said
    )
    page = (tmp_path / "hang-3-score.txt").read_text()
    assert "test_a_phase_that_stands_still" in page
    assert not list(tmp_path.glob("locked-*")), "the last resort was not needed"


def test_whatever_beats_is_alive(tmp_path: Path):
    before = HEART.count
    with PhaseWatchdog(settings(0.8), tmp_path) as dog, dog.watching(1, "generate"):
        for _ in range(20):
            time.sleep(0.05)
            beat()
    assert HEART.count >= before + 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("phase", "is_seen"), [("score", True), ("generate", False)])
def test_what_is_drawn_ahead_hides_no_hang_of_a_loop_that_does_not_wait_for_it(
    phase: str, is_seen: bool, tmp_path: Path
):
    ended = threading.Event()

    def draw() -> None:
        HEART.work_ahead()
        while not ended.wait(0.05):
            beat()
        HEART.end_ahead()

    thread = threading.Thread(target=draw)
    with PhaseWatchdog(settings(0.6), tmp_path) as dog, dog.watching(1, phase):
        thread.start()
        time.sleep(1.0)
        ended.set()
        thread.join()
    assert (reports(tmp_path, f"hang-1-{phase}.txt") > 0) is is_seen


def test_a_new_phase_begins_anew_and_time_between_counts(tmp_path: Path):
    with PhaseWatchdog(settings(0.6), tmp_path) as dog:
        for step in range(4):
            with dog.watching(step, "generate"):
                time.sleep(0.2)
        assert list(tmp_path.glob("hang-*")) == []
        time.sleep(0.9)
    assert reports(tmp_path, "hang-3-between.txt") == 1


def test_phases_have_budgets_of_their_own_and_zero_watches_nothing(tmp_path: Path):
    own = settings(0.0, budgets={"update": 0.2})
    with PhaseWatchdog(own, tmp_path) as dog:
        with dog.watching(1, "score"):
            time.sleep(0.4)
        assert list(tmp_path.glob("hang-*")) == []
        with dog.watching(1, "update"):
            time.sleep(0.3)
    assert reports(tmp_path, "hang-1-update.txt") == 1
    known = {thread.name for thread in threading.enumerate()}
    with PhaseWatchdog(settings(0.0), tmp_path):
        assert {thread.name for thread in threading.enumerate()} == known


def test_saving_that_hangs_or_breaks_is_given_up():
    assert _within(5.0, lambda: "step 3 is saved") == "hang: step 3 is saved"
    assert "could be saved within 0.1 s" in _within(0.1, lambda: time.sleep(1) or "never")

    def broken() -> str:
        raise OSError("disk full")

    assert "saving failed, the newest checkpoint stays: disk full" in _within(5.0, broken)


async def _waits_for_a_tool() -> None:
    await asyncio.sleep(5)


async def _conversation() -> None:
    await _waits_for_a_tool()


def test_tasks_are_shown_with_everything_they_await():
    pages: list[str] = []

    async def main() -> None:
        task = asyncio.create_task(_conversation(), name="rollout 7")
        await asyncio.sleep(0)
        looker = threading.Thread(target=lambda: pages.append(describe_process("now")))
        looker.start()
        looker.join()
        task.cancel()

    asyncio.run(main())
    step_report = pages[0].partition("task rollout 7")[2].partition("\n\n")[0]
    assert "in _conversation" in step_report
    assert step_report.index("_conversation") < step_report.index("in _waits_for_a_tool")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to list processes")
def test_child_processes_are_listed_with_their_commands():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        words, last = Path(f"/proc/{child.pid}/cmdline"), time.monotonic() + 30
        while not words.read_bytes() and time.monotonic() < last:
            time.sleep(0.01)  # the kernel is still replacing the program
        lines = child_lines()
        child.kill()
    assert any(f"{child.pid} (" in line and "time.sleep(60)" in line for line in lines)
