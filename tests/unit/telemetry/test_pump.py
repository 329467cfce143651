"""A reader that stands still: a run goes on, and what is shown meanwhile is dropped."""

import os
import time

import pytest

from luyen.telemetry.output import NonblockingFile, Output, WriterThread


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe into which nothing fits any more."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        while True:
            os.write(theirs, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(theirs, True)
    return ours, theirs


def test_a_reader_that_stands_still_is_not_waited_for():
    ours, theirs = full_pipe()
    pump = WriterThread(theirs, timeout_s=0.2)
    before = time.monotonic()
    assert [pump.write(b"line\n") for _ in range(100)] == [False] * 100
    assert time.monotonic() - before < 5.0
    os.close(ours)


def test_a_reader_that_comes_back_gets_what_follows():
    ours, theirs = full_pipe()
    pump = WriterThread(theirs, timeout_s=0.2)
    assert not pump.write(b"held ")
    while os.read(ours, 1 << 20) != b"held ":
        pass
    # The thread may not have noted yet that its write ended: what comes then is dropped.
    for _ in range(100):
        if pump.write(b"next"):
            break
        time.sleep(0.05)
    assert os.read(ours, 99).startswith(b"next")


def test_a_reader_that_is_gone_is_a_fault():
    ours, theirs = os.pipe()
    os.close(ours)
    with pytest.raises(BrokenPipeError):
        WriterThread(theirs).write(b"x")


def test_a_run_drops_what_nobody_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "luyen.telemetry.output.WriterThread.__init__.__kwdefaults__", {"timeout_s": 0.2}
    )
    ours, theirs = full_pipe()
    said: list[str] = []
    output = Output()
    output.go_on()
    output.listen(said.append)
    saved = os.dup(1)
    os.dup2(theirs, 1)
    try:
        file = NonblockingFile(1, output)
        assert [file.write(b"step\n") for _ in range(3)] == [5, 5, 5]
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert said == [
        "standard output is lost (its reader does not respond); what is shown there is dropped"
    ]
    os.close(ours)
