"""Tabs that follow a run cost little: they share answers, and what was read is kept."""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luyen.base.files import json_line
from luyen.base.rundir import RunDirectory
from luyen.studio.screens import curves, server_cache
from luyen.studio.screens.folder import KnownRun
from luyen.studio.screens.server_cache import _AGAIN_TIMES, Aged, Studio, StudioOptions
from luyen.studio.timeline import read_processes
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import write_rollouts
from luyen.web.reading_routes import SharedReplies
from tests.unit.studio.run_files import rollout

WAIT_S = 20


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


class Slow:
    """Counts how often it is computed, each time after it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Semaphore(0)

    def __call__(self) -> Any:
        self.begun += 1
        mine = self.begun
        assert self.go.acquire(timeout=WAIT_S)
        return {"number": mine}


def number(reply: Any) -> int:
    return json.loads(reply.body)["number"]


def test_fifty_requests_at_once_are_computed_twice_and_no_answer_is_older_than_its_request():
    shared, slow = SharedReplies(), Slow()
    with ThreadPoolExecutor(60) as pool:
        first = pool.submit(shared.reply, "a", slow)
        until(lambda: slow.begun == 1)
        later = [pool.submit(shared.reply, "a", slow) for _ in range(50)]
        until(lambda: sum(f.running() for f in later) == 50)
        time.sleep(0.05)
        slow.go.release()
        until(lambda: slow.begun == 2)
        slow.go.release()
        assert number(first.result(WAIT_S)) == 1
        assert {number(f.result(WAIT_S)) for f in later} == {2}
        assert slow.begun == 2
        other = pool.submit(shared.reply, "a", slow)
        slow.go.release()
        assert number(other.result(WAIT_S)) == 3


def test_other_questions_do_not_wait():
    shared, slow = SharedReplies(), Slow()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.reply, "a", slow)
        until(lambda: slow.begun == 1)
        assert shared.reply("b", lambda: {"number": 7}).body == b'{"number": 7}'
        slow.go.release()
        first.result(WAIT_S)


def test_a_failure_is_met_by_everyone_who_asked_and_leaves_nothing_behind():
    shared, gate = SharedReplies(), threading.Event()

    def fail() -> Any:
        assert gate.wait(WAIT_S)
        raise LookupError("gone")

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(shared.reply, "a", fail) for _ in range(6)]
        time.sleep(0.05)
        gate.set()
        for one in asked:
            with pytest.raises(LookupError, match="gone"):
                one.result(WAIT_S)
    assert json.loads(bytes(shared.reply("a", lambda: [1]).body)) == [1]


def span(step: int, name: str, start: float) -> str:
    return json_line({"span": name, "start": start, "duration_s": 0.5, "step": step})


def known_run(root: Path) -> KnownRun:
    run = RunDirectory.create(root / "p" / "a", config="{}", provenance={}, manifest={})
    return KnownRun(id="x", directory=run, row={}, problem=None)


def test_spans_that_are_read_on_are_those_of_the_whole_files(tmp_path: Path):
    known, kept, chance = known_run(tmp_path), server_cache.KeptSpans(), random.Random(3)
    files = [known.directory.events / name for name in ("controller-5.jsonl", "actor-0.jsonl")]
    heads = [{"process": "controller", "pid": 5}, {"process": "actor", "index": 0, "pid": 6}]
    for file, head in zip(files, heads, strict=True):
        file.write_text(json_line({"schema": 1, **head}) + span(1, "update", 10.0))
    for turn in range(40):
        file = chance.choice(files)
        text = span(turn // 4, chance.choice(("generate", "publish")), 10.0 + turn)
        text += json_line({"schema": 1, **heads[files.index(file)]}) if turn % 9 == 8 else ""
        cut = chance.randrange(len(text))
        with file.open("a") as lines:
            lines.write(text[:cut])
            lines.flush()
            kept.processes(known)  # the last line is not whole
            lines.write(text[cut:])
        assert kept.processes(known) == read_processes(known.directory.root)
    new = files[0].with_suffix(".new")
    new.write_text(files[0].read_text() + span(99, "publish", 500.0))
    os.replace(new, files[0])
    assert kept.processes(known) == read_processes(known.directory.root)
    files[1].unlink()
    assert kept.processes(known) == read_processes(known.directory.root)


def test_spans_beyond_the_bound_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_cache, "_MOST_SPANS", 2)
    known, kept = known_run(tmp_path), server_cache.KeptSpans()
    head = json_line({"schema": 1, "process": "controller", "pid": 5})
    lines = "".join(span(i, "update", 10.0 + i) for i in range(3))
    (known.directory.events / "controller-5.jsonl").write_text(head + lines)
    for _ in range(2):
        assert len(kept.processes(known)[0].spans) == 3
    assert not kept._files


def test_a_live_run_is_diagnosed_seldom_and_one_that_ended_at_once():
    with ThreadPoolExecutor(1) as pool:
        aged: Aged[int] = Aged(pool)
        made: list[int] = []

        def make() -> int:
            made.append(len(made))
            time.sleep(1.0 if len(made) == 1 else 0.0)
            return len(made)

        assert aged.get("a", 1, make, wait_s=WAIT_S, is_urgent=False) == (1, True)
        [(_, due, _)] = aged._values.values()
        assert due - time.monotonic() > 0.9 * _AGAIN_TIMES
        assert aged.get("a", 2, make, wait_s=WAIT_S, is_urgent=False) == (1, False)
        assert len(made) == 1
        assert aged.get("a", 3, make, wait_s=WAIT_S, is_urgent=True) == (1, False)
        until(lambda: aged.get("a", 3, make, wait_s=0, is_urgent=True) == (2, True))
        assert len(made) == 2


def write_random_rewards(run: RunDirectory, step: int, chance: np.random.Generator) -> None:
    rows = [
        rollout(step=step, draw=i // 4, sample=i % 4, reward=float(chance.integers(2)))
        for i in range(40)
    ]
    write_rollouts(run.rollouts(step), rows, step=step)


def test_only_the_first_waits_for_a_value_that_is_computed():
    gate = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        aged: Aged[int] = Aged(pool)

        def get(wait_s: float) -> tuple[int | None, bool]:
            return aged.get("a", 1, lambda: int(gate.wait(120)), wait_s=wait_s, is_urgent=True)

        assert get(0.01) == (None, False)
        begun = time.monotonic()
        assert get(60.0) == (None, False)
        assert time.monotonic() - begun < 30.0
        gate.set()
        until(lambda: get(60.0) == (1, True))


def test_the_interval_of_a_step_is_computed_again_when_its_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = "trainer: {stage: rl, total_training_steps: 3}\n"
    run = RunDirectory.create(tmp_path / "p" / "a", config=config, provenance={}, manifest={})
    chance = np.random.default_rng(3)
    for step in (1, 2):
        write_random_rewards(run, step, chance)
    run.metrics.write_text("".join(metrics_line(i, {"reward/mean": 0.5}) for i in (1, 2)))
    studio = Studio(StudioOptions(folder=tmp_path))
    try:
        studio.folder.scan()
        [row] = studio.folder.rows(wait_s=WAIT_S)[0]
        calls: list[int] = []
        own = curves.half_width

        def counted(*given: Any) -> float | None:
            calls.append(1)
            return own(*given)

        monkeypatch.setattr(curves, "half_width", counted)

        def low() -> list[Any]:
            given: dict[str, Any] = {"points": 800, "start": None, "end": None}
            page = curves.metric_series(studio, row["id"], ["reward/mean"], **given)
            return [] if page["pending"] else page["series"]["reward/mean"]["low"]

        until(lambda: len(low()) == 2)
        before = low()
        assert len(calls) == 2
        write_random_rewards(run, 2, chance)
        until(lambda: low() != before)
        assert low()[0] == before[0]
        assert len(calls) == 3
    finally:
        studio.close()
