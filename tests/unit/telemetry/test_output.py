"""What becomes of a command whose standard streams are closed, full, gone, or know no umlauts."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from luyen.telemetry.display import PlainDisplay
from luyen.telemetry.output import Output, SafeDisplay
from luyen.telemetry.summary import last_note, note
from luyen.train.interrupt import Interruption, Stopped, stopped_by_signals

SCRIPT = """
import os, sys
from luyen.telemetry.output import OUTPUT, flushed, ensure_streams, say
ensure_streams()
if sys.argv[1] == "run":
    OUTPUT.go_on()
told = open(sys.argv[2], "w")
assert told.fileno() > 2, "no file has the number of a stream"
OUTPUT.listen(lambda words: (told.write(words + "\\n"), told.flush()))
for number in range(2000):
    print("step", number, "\\u2581\\u00e9\\udcff" * 20)
    sys.stdout.flush()
    say("error")
sys.exit(3 if flushed() else 0)
"""
COMMAND = """
import sys, typer
from luyen.base.errors import UserError
from luyen.cli import main
from luyen.telemetry.output import flushed
def command():
    for number in range(20000):
        typer.echo("line " * 10)
main.app = command
main.run()
"""


def run(script: str, *words: object, **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, text=True, capture_output=False, check=False, **how)  # type: ignore[call-overload]


def closing(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_a_run_goes_on_without_streams_and_each_is_told_once(tmp_path: Path, numbers):
    told, null = tmp_path / "told", subprocess.DEVNULL
    done = run(SCRIPT, "run", told, stdout=null, stderr=null, preexec_fn=closing(*numbers))
    assert done.returncode == 0
    lines = told.read_text().splitlines()
    assert len(lines) == len([number for number in numbers if number > 0])
    assert all("closed at the start" in line for line in lines)


def test_a_run_goes_on_when_its_disk_is_full(tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        done = run(SCRIPT, "run", tmp_path / "told", stdout=full, stderr=full)
    assert done.returncode == 0
    lines = sorted((tmp_path / "told").read_text().splitlines())
    assert [line.partition(" (")[0] for line in lines] == [
        "standard error is lost",
        "standard output is lost",
    ]


def test_a_run_goes_on_when_its_terminal_is_gone(tmp_path: Path):
    ours, theirs = pty.openpty()
    os.close(ours)
    done = run(SCRIPT, "run", tmp_path / "told", stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert "standard output is lost (Input/output error)" in (tmp_path / "told").read_text()


@pytest.mark.parametrize("script", [SCRIPT, COMMAND], ids=["run", "command"])
def test_a_reader_that_leaves_ends_a_command_quietly_and_a_run_not_at_all(
    tmp_path: Path, script: str
):
    source, sink = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script, "run", tmp_path / "told"],
        stdout=sink,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(sink)
        os.read(source, 10)
        os.close(source)
        _, errors = process.communicate()
    assert process.returncode == (0 if script is SCRIPT else 141)
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_a_command_whose_output_finds_no_room_says_so():
    with Path("/dev/full").open("w") as full:
        done = run(COMMAND, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "error: standard output" in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
def test_no_encoding_stops_a_run(tmp_path: Path, variables: dict[str, str]):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | variables}
    done = run(SCRIPT, "run", tmp_path / "told", **how)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout.count("step") == 2000
    assert (tmp_path / "told").read_text() == ""


class Broken(StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_display_of_a_library_never_stops_its_caller():
    output, told = Output(), list[str]()
    output.listen(told.append)
    display = SafeDisplay(PlainDisplay(Broken()), output)
    display.waiting("rows")
    display.start(3)
    display.phase("generate")
    display.step(1, {"reward/mean": 1.0})
    display.close()
    assert len(told) == 1
    assert told[0].startswith("the display is lost")


def test_notes_are_kept_and_never_raise(tmp_path: Path):
    note(tmp_path / "nowhere", "lost")
    for words in ("one", "two"):
        note(tmp_path, words)
    assert last_note(tmp_path) == "two"
    with (tmp_path / "notes.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert last_note(tmp_path) == ""


def test_a_handler_of_signals_survives_a_broken_stderr():
    code = "import os, signal, sys\nfrom luyen.train.interrupt import Interruption\nos.close(2)\n"
    code += "with Interruption() as asked:\n    signal.raise_signal(signal.SIGTERM)\n"
    code += "    sys.exit(0 if asked.number == signal.SIGTERM else 1)"
    assert run(code).returncode == 0


def test_sighup_is_handled_like_sigterm_unless_it_is_ignored():
    with Interruption() as asked:
        signal.raise_signal(signal.SIGHUP)
    assert asked.number == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as asked, stopped_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert not asked.is_wanted
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_the_first_step_a_signal_stops_at_once(number: signal.Signals):
    with pytest.raises(Stopped) as stopped, stopped_by_signals():
        signal.raise_signal(number)
    assert stopped.value.exit_code == 128 + number


class Leaving:
    """An object that is signalled while it goes, where Python ignores every exception."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass


def leave_and_wait() -> None:
    Leaving()
    time.sleep(5)


def test_a_signal_that_a_del_swallows_is_sent_once_more(capfd):
    with pytest.raises(Stopped) as stopped, stopped_by_signals():
        leave_and_wait()
    assert stopped.value.exit_code == 143
    assert "Traceback" not in capfd.readouterr().err
