"""Spans are lines on the disk and sums per step, and cost next to nothing."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from luyen.base.files import read_lines
from luyen.telemetry.spans import SpanLog


def test_a_span_is_a_line_with_its_ids(tmp_path: Path):
    log = SpanLog()
    path = log.open(tmp_path / "events", process="controller")
    before = time.time()
    with log.span("generate", step=3, group="3.0.a1", sample=2):
        time.sleep(0.01)
    log.close()
    assert path.name == f"controller-{os.getpid()}.jsonl"
    head, line = read_lines(path)
    assert (head["schema"], head["process"]) == (1, "controller")
    assert (line["span"], line["step"]) == ("generate", 3)
    assert (line["group"], line["sample"]) == ("3.0.a1", 2)
    assert 0.01 <= line["duration_s"] < 1
    assert abs(line["start"] - before) < 1


def test_spans_of_a_step_are_summed_by_name_and_forgotten():
    log = SpanLog()
    for step in (1, 2, 2):
        with log.span("generate", step=step), log.span("tool"):
            time.sleep(0.005)
    sums = log.drain(2)
    assert sums.keys() == {"time/generate", "time/tool"}, "an inner span belongs to the same step"
    assert 0.01 <= sums["time/tool"] <= sums["time/generate"] < 1
    assert log.drain(1) == log.drain(2) == {}


def test_a_span_without_a_step_is_in_no_sum(tmp_path: Path):
    log = SpanLog()
    path = log.open(tmp_path, process="p")
    with log.span("load"):
        pass
    log.close()
    assert read_lines(path)[1]["step"] is None
    assert log.drain(0) == {}


def test_a_span_that_fails_is_recorded_and_ends_its_step(tmp_path: Path):
    log = SpanLog()

    def fail() -> None:
        with log.span("update", step=1):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    with log.span("later"):
        pass
    assert log.drain(1).keys() == {"time/update"}


def test_tasks_and_threads_keep_their_own_step(tmp_path: Path):
    log = SpanLog()
    path = log.open(tmp_path, process="p")

    async def one(step: int) -> None:
        with log.span("outer", step=step):
            await asyncio.sleep(0.002)
            with log.span("inner"):
                await asyncio.sleep(0)

    async def many() -> None:
        await asyncio.gather(*(one(step) for step in range(20)))

    asyncio.run(many())
    threads = [threading.Thread(target=lambda: asyncio.run(one(99))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    inner = [line["step"] for line in read_lines(path) if line.get("span") == "inner"]
    assert sorted(inner) == [*range(20), 99, 99, 99, 99]


def test_a_file_of_an_earlier_process_of_the_same_number_is_continued(tmp_path: Path):
    for _ in range(2):
        log = SpanLog()
        path = log.open(tmp_path, process="p")
        log.close()
    assert len(read_lines(path)) == 2
