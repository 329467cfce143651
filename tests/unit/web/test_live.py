"""A run that goes on updates by itself, for any number of tabs."""

import http.client
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from luyen.base.rundir import RunDirectory
from luyen.studio.screens.live import LineTail, event_bytes
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import write_rollouts
from tests.unit.studio.run_files import rollout
from tests.unit.web.server import Client, serving

CONFIG = "trainer: {stage: rl, total_training_steps: 3}\n"


def begin(root: Path, name: str = "a") -> RunDirectory:
    run = RunDirectory.create(root / "p" / name, config=CONFIG, provenance={}, manifest={})
    run.metrics.write_text(metrics_line(1, {"reward/mean": 0.5}))
    return run


@contextmanager
def opened(client: Client, path: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    headers = {"Authorization": f"Bearer {client.access.token}"}
    connection.request("GET", f"/api/v1{path}", headers=headers)
    with connection.getresponse() as reply:
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield reply
    connection.close()


def events(reply: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in reply:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


def first(reply: http.client.HTTPResponse, wanted: str) -> Any:
    return next(value for name, value in events(reply) if name == wanted)


def test_a_step_a_validation_rollouts_and_the_state_are_told(tmp_path: Path):
    run = begin(tmp_path)
    with serving(tmp_path) as client:
        run_id = client.only_run()
        with opened(client, f"/runs/{run_id}/events") as tab:
            assert next(events(tab)) == ("ping", {})
            time.sleep(0.5)
            with run.metrics.open("a") as lines:
                lines.write(metrics_line(2, {"reward/mean": 0.75, "val/accuracy": 0.5}))
            write_rollouts(run.rollouts(2), [rollout(2)], step=2)
            run.checkpoint(3).mkdir()
            found: dict[str, Any] = {}
            for name, value in events(tab):
                found[name] = value
                # The state is told with each look: by then the checkpoint may not be there.
                is_all = {"step", "validation", "rollouts", "state"} <= set(found)
                if is_all and found["state"]["step"] == 3:
                    break
        assert found["step"] == {"step": 2, "metrics": {"reward/mean": 0.75, "val/accuracy": 0.5}}
        assert found["validation"] == {"step": 2, "metrics": {"val/accuracy": 0.5}}
        assert (found["rollouts"]["split"], found["rollouts"]["step"]) == ("train", 2)
        assert found["state"]["step"] == 3


def test_fifty_tabs_get_the_same_and_share_one_follower(tmp_path: Path):
    run = begin(tmp_path)
    with serving(tmp_path) as client, ExitStack() as stack:
        path = f"/runs/{client.only_run()}/events"
        tabs = [stack.enter_context(opened(client, path)) for _ in range(50)]
        assert all(next(events(tab)) == ("ping", {}) for tab in tabs)
        time.sleep(0.5)
        with run.metrics.open("a") as lines:
            lines.write(metrics_line(2, {"reward/mean": 0.75}))
        assert all(first(tab, "step")["step"] == 2 for tab in tabs)
        assert client.get("/session")["version"]


def test_a_run_that_is_removed_ends_its_streams(tmp_path: Path):
    run = begin(tmp_path)
    with (
        serving(tmp_path) as client,
        opened(client, f"/runs/{client.only_run()}/events") as tab,
    ):
        shutil.rmtree(run.root)
        assert first(tab, "state")["state"] == "removed"
        assert list(events(tab)) == []


def test_new_and_changed_runs_are_told(tmp_path: Path):
    begin(tmp_path)
    with serving(tmp_path) as client:
        client.only_run()
        with opened(client, "/events") as tab:
            assert next(events(tab))[0] == "ping"
            begin(tmp_path, "b")
            assert first(tab, "runs")["path"] == "p/b"


def test_a_tail_gives_only_whole_new_lines(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    tail = LineTail(file)
    assert tail.read() == []
    with file.open("a") as lines:
        lines.write('{"step": 2}\n{"st')
    assert tail.read() == [{"step": 2}]
    with file.open("a") as lines:
        lines.write('ep": 3}\n')
    assert tail.read() == [{"step": 3}]
    os.truncate(file, 0)
    assert tail.read() == []


def test_a_number_that_is_not_finite_is_null_and_text_stays_text():
    said = event_bytes("step", {"a": float("nan"), "b": "x: NaN\n\nevent: evil"})
    assert said.count(b"\n\n") == 1
    assert json.loads(said.partition(b"data: ")[2]) == {"a": None, "b": "x: NaN\n\nevent: evil"}
