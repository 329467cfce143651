"""What the screens of a run say of its files."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luyen.base.run_lock import OWNER
from luyen.base.rundir import RunDirectory
from luyen.studio.screens.metric_table import MetricColumns
from luyen.studio.screens.overview import diagnose_run
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import write_rollouts
from luyen.telemetry.summary import note
from tests.unit.studio.run_files import rollout
from tests.unit.web.server import serving, until

CONFIG = """\
trainer: {stage: rl, total_training_steps: 3, total_epochs: 1, project_name: p}
data: {train_batch_size: 4}
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {model: {path: 'builtin://arithmetic'}}
reward: {api_key: secret-of-mine}
"""


def begin(root: Path, name: str = "a", *, lines: int = 4, config: str = CONFIG) -> RunDirectory:
    run = RunDirectory.create(root / "p" / name, config=config, provenance={}, manifest={})
    values = [
        {"reward/mean": i / 4, "time/generate": 3.0, "time/update": 1.0} for i in range(lines)
    ]
    if lines:
        values[0]["val/accuracy"] = 0.25
        values[-1]["val/accuracy"] = 0.75
    run.metrics.write_text("".join(metrics_line(i, value) for i, value in enumerate(values)))
    return run


def test_the_list_says_how_far_each_run_is(tmp_path: Path):
    run = begin(tmp_path)
    with serving(tmp_path) as client:
        [row] = client.get("/runs")["runs"]
        assert row["id"].startswith("a-")
        assert (row["path"], row["project"], row["stage"]) == ("p/a", "p", "rl")
        assert (row["algorithm"], row["model"]) == ("grpo", "builtin://arithmetic")
        assert (row["state"], row["step"], row["total_steps"]) == ("interrupted", 3, 3)
        assert row["validation"] == {"name": "val/accuracy", "first": 0.25, "last": 0.75}
        assert row["sparkline"] == [0.0, 0.25, 0.5, 0.75]
        assert row["reward_last"] == 0.75
        run.checkpoint(3).mkdir()
        until(lambda: client.get("/runs")["runs"][0]["state"] == "finished")


def test_a_run_whose_process_was_killed_says_so(tmp_path: Path):
    run = begin(tmp_path)
    (run.root / OWNER).write_text(json.dumps({"pid": 2**22 - 3, "host": "x", "since": ""}))
    with serving(tmp_path) as client:
        assert client.get("/runs")["runs"][0]["state"] == "killed"


def test_a_damaged_run_is_shown_with_what_is_wrong(tmp_path: Path):
    run = begin(tmp_path)
    run.config.write_text(run.config.read_text().replace("grpo", "gae"))
    with serving(tmp_path) as client:
        [row] = client.get("/runs")["runs"]
        assert row["state"] == "damaged"
        assert "not as it was written" in row["problem"]
        page = client.get(f"/runs/{row['id']}")
        assert page["verdict"]["level"] == "unknown"
        assert "not as it was written" in page["damage"][0]["message"]
        assert [one["last"] for one in page["headline"] if one["key"] == "reward"] == [0.75]
        plan = client.get(f"/runs/{row['id']}/plan")
        assert "not as it was written" in plan["findings"][0]["message"]


def test_the_overview_has_the_numbers_and_the_time(tmp_path: Path):
    begin(tmp_path)
    with serving(tmp_path) as client:
        run_id = client.only_run()
        until(lambda: not client.get(f"/runs/{run_id}")["pending"])
        page = client.get(f"/runs/{run_id}")
        numbers = {one["key"]: (one["name"], one["last"]) for one in page["headline"]}
        assert numbers["reward"] == ("reward/mean", 0.75)
        assert numbers["validation"] == ("val/accuracy", 0.75)
        assert page["time"] == [
            {"phase": "generate", "seconds": 12.0, "share": 0.75},
            {"phase": "update", "seconds": 4.0, "share": 0.25},
        ]
        assert page["verdict"]["level"] in ("healthy", "degraded")
        assert page["commands"]["resume"] == f"luyen train --resume {tmp_path}/p/a"


def test_findings_of_the_doctor_decide_the_verdict(tmp_path: Path):
    run = begin(tmp_path, lines=0)
    lines = [metrics_line(i, {"reward/mean": 0.5, "actor/pg_loss": math.nan}) for i in range(1, 9)]
    run.metrics.write_text("".join(lines))
    with serving(tmp_path) as client:
        run_id = client.only_run()
        until(lambda: not client.get(f"/runs/{run_id}")["pending"])
        page = client.get(f"/runs/{run_id}")
        assert page["verdict"]["level"] == "collapsed"
        assert "not-finite" in [one["rule"] for one in page["findings"]]
        assert page["findings"][0]["fix"]


def test_damaged_metrics_are_named_in_the_verdict(tmp_path: Path):
    run = begin(tmp_path)
    whole = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([*whole[:1], b"no JSON\n", *whole[2:]]))
    found = diagnose_run(str(run.root))
    assert found["verdict"]["level"] == "unknown"
    assert found["verdict"]["sentence"].startswith(
        "The run cannot be judged: metrics.jsonl: line 2"
    )


def test_curves_come_in_buckets_that_keep_the_peaks(tmp_path: Path):
    run = begin(tmp_path, lines=0)
    values = [0.0] * 1000
    values[637] = 9.0
    text = "".join(metrics_line(i + 1, {"a": v, "b": math.inf}) for i, v in enumerate(values))
    run.metrics.write_text(text)
    with serving(tmp_path) as client:
        found = client.get(f"/runs/{client.only_run()}/series?name=a&name=b&name=c&points=10")
        curve = found["series"]["a"]
        assert curve["step"] == list(range(100, 1001, 100))
        assert curve["high"] == [0, 0, 0, 0, 0, 0, 9, 0, 0, 0]
        assert curve["value"][6] == 0.09
        assert set(found["series"]["b"]["value"]) == {None}
        assert found["series"]["c"]["step"] == []
        part = client.get(f"/runs/{client.only_run()}/series?name=a&start=638&end=640")
        assert part["series"]["a"]["value"] == [9.0, 0.0, 0.0]
        names = {one["name"] for one in client.get(f"/runs/{client.only_run()}/metrics")["names"]}
        assert names == {"a", "b"}


def test_reward_and_validation_have_their_intervals(tmp_path: Path):
    run = begin(tmp_path, lines=0)
    lines = [{"reward/mean": 0.5, "val/accuracy": 0.4, "val/accuracy_low": 0.3,
              "val/accuracy_high": 0.55}, {"reward/mean": 0.25}, {"reward/mean": 0.75}]  # fmt: skip
    run.metrics.write_text("".join(metrics_line(i + 1, line) for i, line in enumerate(lines)))
    # eight groups of two: in four both are right, in four none is
    rows = [rollout(1, draw=i // 2, sample=i % 2, reward=float(i < 8)) for i in range(16)]
    write_rollouts(run.rollouts(1), rows, step=1)
    write_rollouts(run.rollouts(2), [rollout(2, reward=1.0)], step=2)  # one group says nothing
    with serving(tmp_path) as client:
        path = f"/runs/{client.only_run()}/series?name=reward/mean&name=val/accuracy"
        page = until(lambda: None if (found := client.get(path))["pending"] else found)
        short = client.get(f"{path}&points=2")
    reward, accuracy = (page["series"][name] for name in ("reward/mean", "val/accuracy"))
    # the means of the groups are 0 and 1: 1.96 * sqrt(8 * 0.25 / 7) / sqrt(8) = 0.37040
    assert reward["interval"]
    assert reward["low"] == [pytest.approx(0.5 - 0.37040, abs=1e-5), None, None]
    assert reward["high"] == [pytest.approx(0.5 + 0.37040, abs=1e-5), None, None]
    assert (accuracy["low"], accuracy["high"], accuracy["interval"]) == ([0.3], [0.55], True)
    buckets = short["series"]["reward/mean"]
    assert (buckets["low"], buckets["high"], buckets["interval"]) == (
        [0.5, 0.25],
        [0.5, 0.75],
        False,
    )


def test_a_table_reads_only_what_was_appended(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(metrics_line(1, {"a": 1.0}))
    table = MetricColumns(file)
    assert [step for step, _ in table.refresh()] == [1]
    with file.open("a") as lines:
        lines.write(metrics_line(2, {"a": 2.0})[:-4])
    assert table.refresh() == []
    with file.open("a") as lines:
        lines.write(metrics_line(2, {"a": 2.0})[-4:])
    assert table.refresh() == [(2, {"a": 2.0})]
    assert table.curve("a", points=9).value == [1.0, 2.0]
    other = tmp_path / "other"
    other.write_text(metrics_line(1, {"a": 5.0}) + "{broken\n" + metrics_line(7, {"a": 7.0}))
    other.replace(file)
    assert [step for step, _ in table.refresh()] == [1, 7]
    assert (table.curve("a", points=9).value, table.damaged_lines) == ([5.0, 7.0], 1)
    file.unlink()
    table.refresh()
    assert table.names == []


def test_a_large_file_is_read_on_in_the_background_and_nobody_waits(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(metrics_line(step, {"a": 1.0, "b": 2.0}) for step in range(1, 6001)))
    table = MetricColumns(file)
    with ThreadPoolExecutor(max_workers=1) as pool:
        gate = threading.Event()
        pool.submit(gate.wait)
        table.follow(pool, wait_s=0.0)
        begun = time.monotonic()
        table.follow(pool, wait_s=60.0)
        assert (table.is_whole, time.monotonic() - begun < 30.0) == (False, True)
        gate.set()
        until(lambda: table.is_whole)
    assert table.last_step == 6000


def test_a_table_of_many_lines_is_bounded_and_keeps_means_and_peaks(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    values = [float(i % 7) for i in range(20_000)]
    values[12_345] = 100.0
    file.write_text("".join(f'{{"step": {i}, "a": {v}}}\n' for i, v in enumerate(values)))
    table = MetricColumns(file, most_cells=3000)
    table.refresh()
    assert table.size < 3000 * 8 * 3
    assert table.last_step == 19_999
    curve = table.curve("a", points=1)
    assert curve.high == [100.0]
    assert curve.low == [0.0]
    assert curve.value[0] is not None
    assert abs(curve.value[0] - sum(values) / len(values)) < 0.05


def test_resumptions_notes_and_the_chain_are_listed(tmp_path: Path):
    run = begin(tmp_path)
    run.note_resumption({"checkpoint": 2, "is_config_new": False, "changed": [], "command": []})
    note(run.root, "interrupted by SIGTERM after step 2 of 3")
    run.digests.write_text("{}\n")
    with serving(tmp_path) as client:
        page = client.get(f"/runs/{client.only_run()}/faults")
        assert page["attempts"] == 2
        assert page["resumptions"][0]["step"] == 2
        assert "SIGTERM" in page["notes"][0]["note"]
        assert page["broken"][0]["file"] == "digests.jsonl"
        log = client.get(f"/runs/{client.only_run()}/log")
        assert "SIGTERM" in log["lines"][-1]


def test_the_plan_masks_secrets_and_names_sources(tmp_path: Path):
    begin(tmp_path)
    with serving(tmp_path) as client:
        page = client.get(f"/runs/{client.only_run()}/plan")
        assert "secret-of-mine" not in json.dumps(page)
        assert "grpo" in page["yaml"]
        keys = {one["key"]: one for one in page["keys"]}
        assert keys["algorithm.adv_estimator"]["value"] == "grpo"
        assert keys["trainer.seed"]["help"]
        assert page["memory"][0]["total"] == sum(p["bytes"] for p in page["memory"][0]["parts"])


def test_a_run_that_is_removed_while_it_is_shown_is_gone(tmp_path: Path):
    run = begin(tmp_path)
    with serving(tmp_path) as client:
        run_id = client.only_run()
        client.get(f"/runs/{run_id}/series?name=reward/mean")
        shutil.rmtree(run.root)
        reply = client.ask(f"/api/v1/runs/{run_id}/series?name=reward/mean")
        assert reply.status == 404
        assert reply.json["error"]["message"]
        until(lambda: client.get("/runs")["runs"] == [])


def test_an_empty_folder_has_no_runs(tmp_path: Path):
    with serving(tmp_path) as client:
        assert client.get("/runs")["runs"] == []
    with serving(tmp_path / "absent") as client:
        assert client.get("/runs")["runs"] == []


def test_the_api_describes_itself(tmp_path: Path):
    with serving(tmp_path) as client:
        paths = client.get("/openapi.json")["paths"]
        assert "/api/v1/runs/{run_id}/series" in paths
        page = client.ask("/api/v1/docs").body.decode()
        assert "/api/v1/runs/{run_id}/series" in page
        assert "http://" not in page
        assert "https://" not in page


STARTED = """
import resource, sys, threading, urllib.request
from luyen.serve import server
import luyen.web.app as studio_app
from luyen.cli.main import app

def serve(built, opened, **_):
    one = server.uvicorn_server(built, drain_s=1)
    thread = threading.Thread(target=one.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    url = server.url_of(opened)
    try:
        urllib.request.urlopen(url).read()
    except urllib.error.HTTPError as error:
        assert error.code == 401
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime)
    one.should_exit = True
    thread.join()
    return 0

studio_app.serve = serve
sys.argv = ["luyen", "studio", sys.argv[1], "--no-open", "--port", "0"]
app(standalone_mode=False)
late = {"torch", "pyarrow", "luyen.config.check", "luyen.config.schema.run"}
assert not late & set(sys.modules), late & set(sys.modules)
"""
# What no studio can do without.
LIBRARIES = """
import fastapi, numpy, resource, rich.console, uvicorn
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def processor_s(program: str, argument: str = "") -> float:
    """The processor time that a program says it used."""
    done = subprocess.run(
        [sys.executable, "-c", program, argument],
        check=True, capture_output=True, text=True, env={**os.environ},
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def test_forms_are_prepared_after_the_start_and_without_torch():
    text = """
import sys, time
from luyen.web.app import prepare_forms
prepare_forms()
from luyen.studio.screens.new_run import check_text
begun = time.process_time()
check_text("{}", ())
assert not {"torch", "pyarrow"} & set(sys.modules)
assert "luyen.config.schema.run" in sys.modules
print(time.process_time() - begun)
"""
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    assert float(done.stdout.split()[-1]) < 0.5  # more than a second where nothing is loaded


def test_the_studio_starts_quickly_and_without_torch(tmp_path: Path):
    begin(tmp_path)
    # In turn, and the best of each: other tests share the processor.
    pairs = [(processor_s(LIBRARIES), processor_s(STARTED, str(tmp_path))) for _ in range(3)]
    libraries, started = (min(times) for times in zip(*pairs, strict=True))
    assert started < 2.25 * libraries, f"{started:.2f} s, its libraries alone {libraries:.2f} s"
