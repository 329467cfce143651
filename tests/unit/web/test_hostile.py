"""Odd queries, odd files and the end of the server: one bad run or request harms no other."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from luyen.base.rundir import RunDirectory
from luyen.studio.screens import metric_table, server_cache
from luyen.studio.screens.live import LineTail
from luyen.studio.screens.metric_table import MetricColumns
from luyen.studio.screens.server_cache import Studio, StudioOptions
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import write_rollouts
from tests.unit.studio.run_files import rollout
from tests.unit.web.server import serving, until

CONFIG = """\
trainer: {stage: rl, total_training_steps: 3, total_epochs: 1}
data: {train_batch_size: 4}
actor_rollout_ref: {model: {path: 'builtin://arithmetic'}}
"""


def begin(root: Path, name: str, metrics: str = "", *, config: str = CONFIG) -> RunDirectory:
    run = RunDirectory.create(root / "p" / name, config=config, provenance={}, manifest={})
    run.metrics.write_text(metrics or metrics_line(1, {"reward/mean": 0.5}))
    return run


@pytest.mark.parametrize(
    "metrics",
    [
        '{"step": 1, "val/accuracy": 1' + "0" * 400 + "}\n",
        '{"step": 1, "reward/mean": 1' + "0" * 400 + "}\n",
        '{"step": 1' + "0" * 40 + ', "reward/mean": 1}\n',
        '{"step": -1e999, "reward/mean": 1}\n',
        "[" * 50_000 + "\n",
    ],
)
def test_numbers_beyond_every_type_break_no_screen_and_no_other_run(tmp_path: Path, metrics: str):
    begin(tmp_path, "odd", metrics + metrics_line(2, {"reward/mean": 0.25}))
    with serving(tmp_path) as client:
        until(lambda: client.get("/runs")["is_whole"])
        begin(tmp_path, "later")  # the thread that lists the folder is still there
        until(lambda: len(client.get("/runs")["runs"]) == 2)
        ids = {row["name"]: row["id"] for row in client.get("/runs")["runs"]}
        found = client.get(f"/runs/{ids['odd']}/series?name=reward/mean")
        assert found["series"]["reward/mean"]["value"][-1] == 0.25
        client.get(f"/runs/{ids['odd']}")


def test_a_configuration_that_divides_by_zero_is_a_damaged_run(tmp_path: Path):
    config = CONFIG.replace("train_batch_size: 4", "train_batch_size: 0")
    config = config.replace("total_training_steps: 3", "total_training_steps: null")
    run = RunDirectory.create(
        tmp_path / "p" / "odd", config=config, provenance={}, manifest={"rows": {"train": 8}}
    )
    begin(tmp_path, "sound")
    with serving(tmp_path) as client:
        until(lambda: client.get("/runs")["is_whole"])
        states = {row["name"]: row["state"] for row in client.get("/runs")["runs"]}
    assert states == {run.root.name: "damaged", "sound": "interrupted"}


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("series?name=reward/mean&start=1" + "0" * 30, 200),
        ("series?name=reward/mean&end=-1" + "0" * 30, 200),
        ("series?name=reward/mean&points=1" + "0" * 30, 200),
        ("series?name=reward/mean&points=-5", 200),
        ("series?name=" + "x" * 5000, 200),
        ("series?start=1" + "0" * 5000, 422),
        ("series?" + "name=a&" * 65, 422),
        ("rollouts?start=1" + "0" * 30, 200),
        ("rollouts?end=-1" + "0" * 30, 200),
        ("rollouts?reward_min=nan&reward_max=inf", 200),
        ("rollouts?reward_min=1e300", 200),
        ("rollouts?limit=1000000", 422),
        ("rollouts?cursor=x", 422),
        ("rollouts?sort=reward&cursor=%C2%B2", 422),
        ("rollouts?sort=reward&cursor=" + "9" * 5000, 422),
        ("rollouts?sort=reward&cursor=1000000000", 422),
        ("rollouts?group=1.x.y", 422),
        ("rollouts?group=1.1" + "0" * 40, 200),
        ("rollouts/train/1/-1", 404),
        ("rollouts/train/1/1" + "0" * 30, 404),
        ("rollouts/train/1" + "0" * 300 + "/0", 404),
        ("rollouts/other/1/0", 422),
        ("groups/train/1" + "0" * 300 + "/a", 404),
        ("timeline?start=5&end=1", 200),
        ("timeline?start=-1" + "0" * 30 + "&end=1" + "0" * 30, 200),
        ("log?tail=100000", 422),
    ],
)
def test_odd_queries_are_answered_or_refused(tmp_path: Path, query: str, status: int):
    run = begin(tmp_path, "a")
    write_rollouts(run.rollouts(1), [rollout(1, reward=1.0)], step=1)
    with serving(tmp_path) as client:
        reply = client.ask(f"/api/v1/runs/{client.only_run()}/{query}")
        assert reply.status == status, reply.body[:500]
        assert json.loads(reply.body)


def test_names_longer_than_those_of_files_are_not_found(tmp_path: Path):
    with serving(tmp_path) as client:
        assert client.ask("/" + "a" * 5000 + ".js").status == 404
        assert client.ask("/" + "%C3%A9" * 200 + ".js").status == 404


def test_a_body_without_a_length_is_refused_before_it_is_read(tmp_path: Path):
    with serving(tmp_path) as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        headers = {
            "Authorization": f"Bearer {client.access.token}",
            "Content-Type": "application/json",
            "X-Luyen-Studio": "1",
        }
        pieces = (b" " * 2**20 for _ in range(5))
        connection.request("POST", "/api/v1/check", pieces, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()


@pytest.mark.parametrize("other", ['a b=[1]; "', 'x={"a": 1}; ', "=;;", "luyen_studio_PORT=old; "])
def test_cookies_of_other_servers_of_the_host_do_not_hide_ours(tmp_path: Path, other: str):
    with serving(tmp_path) as client:
        own = f"{client.access.cookie}={client.access.token}"
        sent = f"{other.replace('PORT', str(client.port))}; {own}"
        reply = client.ask("/api/v1/session", is_known=False, headers={"Cookie": sent})
        assert reply.status == 200


def test_pages_of_equal_values_show_every_rollout_once(tmp_path: Path):
    run = begin(tmp_path, "a")
    for step in (1, 2):
        rows = [rollout(step, draw=i, reward=float(i % 2)) for i in range(300)]
        write_rollouts(run.rollouts(step), rows, step=step)
    with serving(tmp_path) as client:
        run_id = client.only_run()
        until(lambda: client.get(f"/runs/{run_id}/rollouts")["total_rows"] == 600)
        seen: list[tuple[int, int]] = []
        cursor = ""
        while cursor is not None:
            page = client.get(f"/runs/{run_id}/rollouts?sort=reward&limit=47&cursor={cursor}")
            seen += [(row["step"], row["index"]) for row in page["rows"]]
            cursor = page["cursor"]
        assert len(seen) == len(set(seen)) == 600


def test_a_link_to_a_file_of_rollouts_is_not_followed(tmp_path: Path):
    outside = tmp_path / "outside.parquet"
    write_rollouts(outside, [rollout(1, reward=1.0)], step=1)
    run = begin(tmp_path / "runs", "a")
    run.rollouts(1).parent.mkdir(exist_ok=True)
    run.rollouts(1).symlink_to(outside)
    with serving(tmp_path / "runs") as client:
        reply = client.ask(f"/api/v1/runs/{client.only_run()}/rollouts/train/1/0")
        assert reply.status == 409
        assert "link" in reply.json["error"]["message"]


def test_a_link_that_is_made_later_is_seen(tmp_path: Path):
    run = begin(tmp_path / "runs", "a")
    outside = tmp_path / "digests.jsonl"
    outside.write_text("{}\n")
    with serving(tmp_path / "runs") as client:
        run_id = client.only_run()
        assert client.ask(f"/api/v1/runs/{run_id}/faults").status == 200
        run.digests.unlink(missing_ok=True)
        run.digests.symlink_to(outside)
        until(lambda: client.ask(f"/api/v1/runs/{run_id}/faults").status == 409)


def test_many_metrics_after_many_lines_stay_within_the_bound(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {i}, "a": {float(i)}}}\n' for i in range(1001)]
    late = ", ".join(f'"b{i}": 1.0' for i in range(50))
    file.write_text("".join(lines) + f'{{"step": 1001, {late}}}\n')
    table = MetricColumns(file, most_cells=40_000)
    table.refresh()
    assert table.size < 51 * 8 * metric_table._LEAST_ROOM * 3 + 8 * metric_table._LEAST_ROOM + 1
    curve = table.curve("a", points=1)
    assert (curve.low, curve.high) == ([0.0], [1000.0])
    assert table.last_step == 1001
    assert table.last["b49"] == 1.0


def test_a_line_without_an_end_is_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("luyen.studio.screens.live._MOST_READ", 64)
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    tail = LineTail(file)
    file.write_text("x" * 100 + "\n" + metrics_line(1, {"a": 1.0})[:60])
    assert tail.read() == []
    assert tail.read() == [{}]


def test_the_doctor_imports_nothing_from_the_folder_in_which_the_studio_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin(tmp_path, "a")
    (tmp_path / "json.py").write_text("open('imported', 'w').close()\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path) as client:
        run_id = client.only_run()
        until(lambda: not client.get(f"/runs/{run_id}")["pending"])
        assert client.get(f"/runs/{run_id}")["verdict"]["level"] != "unknown"
    assert not (tmp_path / "imported").exists()


def test_a_process_ends_with_the_studio_or_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    studio = Studio(StudioOptions(folder=tmp_path))
    done: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: done.append(studio.run_process(sleep)))
    thread.start()
    until(lambda: studio._processes)
    studio.close()
    thread.join(30)
    assert done[0].returncode == -signal.SIGKILL
    assert studio.run_process(sleep).returncode == -1
    monkeypatch.setattr(server_cache, "_MOST_PROCESS_S", 0.1)
    assert Studio(StudioOptions(folder=tmp_path)).run_process(sleep).returncode == -signal.SIGKILL


def test_waiting_for_an_unknown_run_holds_up_no_other_request(tmp_path: Path):
    with serving(tmp_path) as client:
        until(lambda: client.get("/runs")["is_whole"])
        client.studio.folder._first.clear()  # as before the first scan of a large folder
        client.studio.folder._lock.acquire()
        try:
            asked = threading.Thread(target=client.ask, args=("/api/v1/runs/a-00000000/events",))
            asked.start()
            time.sleep(0.3)
            begun = time.monotonic()
            assert client.ask("/api/v1/session").status == 200
            assert time.monotonic() - begun < 2.0
        finally:
            client.studio.folder._lock.release()
        asked.join(30)
