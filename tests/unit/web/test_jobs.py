"""Jobs of the studio: queued, started, stopped, found again, and refused."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luyen.base.rundir import RunDirectory
from luyen.studio.actions.job_files import STUDIO, JobFiles, JobRecord, new_id, start_of
from luyen.studio.actions.job_queue import JobQueue
from tests.unit.web.server import Client, serving, until

CONFIG = """
data:
  train_files: arithmetic://sum?digits=1
  max_prompt_length: 32
  max_response_length: 4
  train_batch_size: 2
actor_rollout_ref:
  model: {path: builtin://arithmetic, enable_gradient_checkpointing: false}
  actor: {ppo_mini_batch_size: 2}
  rollout: {name: native, n: 2, max_num_seqs: 4}
trainer: {total_training_steps: STEPS, project_name: p, experiment_name: written}
"""
SHORT, LONG = CONFIG.replace("STEPS", "1"), CONFIG.replace("STEPS", "100000")


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUYEN_KEY_FILE", str(tmp_path / "key"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    files = JobFiles(folder.resolve())
    for record in files.records():
        process = files.process(record.id)
        if process is not None and process[1]:
            os.kill(process[0], signal.SIGKILL)


def job(client: Client, job_id: str) -> dict[str, Any]:
    return next(one for one in client.get("/jobs")["jobs"] if one["id"] == job_id)


def settled(client: Client, job_id: str) -> dict[str, Any]:
    """The job once it is over."""
    over = ("finished", "failed", "stopped")
    return until(lambda: (found := job(client, job_id))["state"] in over and found, seconds=120)


def start(client: Client, text: str, name: str) -> str:
    reply = client.post("/jobs", {"yaml": text, "name": name, "overrides": []})
    assert reply.status == 200, reply.body
    return reply.json["id"]


def until_steps(client: Client, job_id: str, steps: int) -> dict[str, Any]:
    return until(lambda: (one := job(client, job_id))["step"] and one["step"] >= steps and one,
                 seconds=120)  # fmt: skip


def test_a_run_is_trained_below_the_folder_whatever_its_file_says(root: Path, tmp_path: Path):
    text = SHORT.replace("trainer: {", f"trainer: {{default_local_dir: {tmp_path}/x, ")
    with serving(root) as client:
        assert client.get("/session")["acting"] is True
        job_id = start(client, text, "mine")
        done = settled(client, job_id)
        assert (done["state"], done["error"]) == ("finished", None), client.get(
            f"/jobs/{job_id}/log"
        )
        assert RunDirectory(root / "p" / "mine").exists
        assert not (tmp_path / "x").exists()
        until(lambda: job(client, job_id)["run_id"])
        run_id = job(client, job_id)["run_id"]
        assert client.get(f"/runs/{run_id}")["name"] == "mine"
        assert client.get(f"/runs/{run_id}/log")["source"] == "job"
        assert client.get(f"/jobs/{job_id}/log?tail=3")["lines"] != []
        assert len(client.get(f"/jobs/{job_id}/log?tail=3")["lines"]) <= 3
    files = JobFiles(root.resolve())
    assert files.config(job_id).read_text() == text
    for path in files.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_jobs_wait_for_one_another_and_one_that_waits_is_cancelled(root: Path):
    with serving(root) as client:
        first = start(client, LONG, "first")
        second = start(client, LONG, "second")
        assert job(client, second)["state"] == "queued"
        assert client.post(f"/jobs/{second}/stop", {}).status == 409
        assert client.post(f"/jobs/{second}/cancel", {}).json["state"] == "stopped"
        third = start(client, SHORT, "third")
        until_steps(client, first, 1)
        assert job(client, third)["state"] == "queued"
        assert client.post(f"/jobs/{first}/cancel", {}).status == 409
        assert client.post(f"/jobs/{first}/stop", {}).status == 200
        assert settled(client, first)["state"] == "stopped"
        assert list((root / "p" / "first" / "checkpoints").glob("step_*"))
        assert settled(client, third)["state"] == "finished"
        assert not (root / "p" / "second").exists()
        assert job(client, second)["state"] == "stopped"


def test_a_stopped_run_is_resumed_as_a_job(root: Path):
    with serving(root) as client:
        job_id = start(client, LONG, "again")
        run_id = until_steps(client, job_id, 1)["run_id"]
        assert client.post(f"/runs/{run_id}/resume", {}).status == 409
        client.post(f"/jobs/{job_id}/stop", {})
        assert settled(client, job_id)["state"] == "stopped"
        until(lambda: client.get(f"/runs/{run_id}")["state"] != "running")
        steps = client.get(f"/runs/{run_id}")["step"]
        reply = client.post(
            f"/runs/{run_id}/resume",
            {"overrides": [f"trainer.total_training_steps={steps + 2}"]},
        )
        assert reply.status == 200, reply.body
        assert "--resume" in reply.json["command"]
        done = settled(client, reply.json["id"])
        assert done["state"] == "finished", client.get(f"/jobs/{done['id']}/log")
        until(lambda: client.get(f"/runs/{run_id}")["step"] == steps + 2)


def studio_process(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "luyen", "studio", str(root), "--port", "0", "--no-open"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_kill_9_of_the_studio_hurts_no_run_and_the_next_studio_finds_it(root: Path):
    files = JobFiles(root.resolve())
    files.make()
    studio = studio_process(root)
    assert studio.stdout is not None
    assert "token=" in studio.stdout.readline()
    job_id = new_id()
    digest = files.write_config(job_id, LONG)
    words = ("train", str(files.config(job_id)), f'trainer.default_local_dir="{root}"',
             'trainer.experiment_name="long"')  # fmt: skip
    files.write(
        JobRecord(
            id=job_id,
            name="long",
            words=words,
            folder=str(Path.cwd()),
            digest=digest,
            created="2026-01-01T00:00:00+00:00",
            run="p/long",
        )
    )
    pid = until(lambda: (found := files.process(job_id)) and found[1] and found[0])
    metrics = root / "p" / "long" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size > 0, seconds=120)
    studio.kill()
    studio.wait()
    studio.stdout.close()
    before = metrics.stat().st_size
    until(lambda: metrics.stat().st_size > before)
    with serving(root) as client:
        assert job(client, job_id)["state"] == "running"
        assert client.post(f"/jobs/{job_id}/stop", {}).status == 200
        assert settled(client, job_id)["state"] == "stopped"
    until(lambda: start_of(pid) is None)
    assert files.exit_code(job_id) == 128 + signal.SIGTERM


def test_a_killed_job_has_failed_and_says_so(root: Path):
    with serving(root) as client:
        job_id = start(client, LONG, "killed")
        until_steps(client, job_id, 1)
        process = JobFiles(root.resolve()).process(job_id)
        assert process is not None
        os.kill(process[0], signal.SIGKILL)
        done = settled(client, job_id)
        assert done["state"] == "failed"
        assert done["error"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"yaml": "trainer: {total_training_steps: -1}"}, "trainer.total_training_steps"),
        ({"yaml": "no_such_key: 1"}, "no_such_key"),
        ({"yaml": SHORT, "name": "../../out"}, None),
        ({"yaml": SHORT, "name": "a/../../../out"}, None),
        ({"yaml": SHORT, "overrides": ["trainer.project_name=../.."]}, None),
        ({"name": "a"}, "yaml"),
    ],
)
def test_what_check_refuses_never_becomes_a_job(root: Path, body: Any, field: str | None):
    with serving(root) as client:
        reply = client.post("/jobs", body)
        assert reply.status == 422, reply.body
        if field is not None:
            assert reply.json["error"]["field"] == field
        assert client.get("/jobs")["jobs"] == []
    assert not (root.parent / "out").exists()


def test_two_jobs_of_one_run_are_refused(root: Path):
    with serving(root) as client:
        job_id = start(client, LONG, "same")
        reply = client.post("/jobs", {"yaml": LONG, "name": "same"})
        assert reply.status in (409, 422)
        until(lambda: JobFiles(root.resolve()).process(job_id))
        client.post(f"/jobs/{job_id}/stop", {})
        settled(client, job_id)


ACTING = (
    ("/jobs", {"yaml": SHORT}),
    ("/jobs/20260101-000000-000000/stop", {}),
    ("/jobs/20260101-000000-000000/cancel", {}),
    ("/exports", {"run_id": "a-00000000", "output": "x"}),
    ("/runs/a-00000000/resume", {}),
)


@pytest.mark.parametrize(("path", "body"), ACTING)
def test_acting_needs_the_token_and_the_header(root: Path, path: str, body: Any):
    data = json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "X-Luyen-Studio": "1"}
    with serving(root) as client:
        address = f"/api/v1{path}"
        reply = client.ask(address, method="POST", headers=sent, body=data, is_known=False)
        assert reply.status == 401
        plain = {"Content-Type": "application/json"}
        assert client.ask(address, method="POST", headers=plain, body=data).status == 403
        evil = {**sent, "Origin": "http://evil.example"}
        assert client.ask(address, method="POST", headers=evil, body=data).status == 403
    assert not (root / STUDIO).exists()


def test_a_read_only_studio_has_no_acting_route_and_starts_no_queued_job(root: Path):
    files = JobFiles(root.resolve())
    files.make()
    job_id = new_id()
    files.write(
        JobRecord(
            id=job_id,
            name="a",
            words=("--version",),
            folder=str(root),
            created="2026-01-01T00:00:00+00:00",
        )
    )
    with serving(root, is_read_only=True) as client:
        assert client.get("/session")["acting"] is False
        paths = client.get("/openapi.json")["paths"]
        assert not any("jobs" in path or "exports" in path for path in paths)
        for path, body in ACTING:
            assert client.post(path, body).status in (404, 405)
        time.sleep(2.5)
    assert files.process(job_id) is None


def test_jobs_of_another_user_or_folder_are_no_jobs_here(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = JobFiles(root.resolve())
    files.make()
    own, foreign = new_id(), "20260101-000000-ffffff"
    record = {"name": "a", "words": ("train", "evil.yaml"), "folder": str(root),
              "created": "2026-01-01T00:00:00+00:00"}  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(root, other)
    JobFiles(other.resolve()).write(JobRecord(id=own, **record))
    shutil.copy(other / STUDIO / "jobs" / f"{own}.json", files.folder)
    monkeypatch.setenv("LUYEN_KEY_FILE", str(tmp_path / "their_key"))
    files.write(JobRecord(id=foreign, **record))
    monkeypatch.setenv("LUYEN_KEY_FILE", str(tmp_path / "key"))
    with serving(root) as client:
        assert client.get("/jobs")["jobs"] == []
        assert client.ask(f"/api/v1/jobs/{foreign}/log").status == 404
        assert client.ask("/api/v1/jobs/..%2f..%2fkey/log").status == 404
        time.sleep(2.5)
    assert files.process(own) is None
    assert files.process(foreign) is None


def test_a_configuration_that_was_changed_behind_the_studio_is_not_trained(root: Path):
    files = JobFiles(root.resolve())
    files.make()
    job_id = new_id()
    digest = files.write_config(job_id, SHORT)
    words = ("train", str(files.config(job_id)))
    files.write(
        JobRecord(
            id=job_id,
            name="a",
            words=words,
            folder=str(root),
            digest=digest,
            created="2026-01-01T00:00:00+00:00",
        )
    )
    files.config(job_id).write_text(LONG)
    with serving(root) as client:
        done = settled(client, job_id)
        assert done["state"] == "failed"
        assert "changed" in done["error"]
    assert files.process(job_id) is None


@pytest.mark.parametrize("output", ["/tmp/out", "../out", "p/../../out", ".studio/x", "."])
def test_an_export_stays_below_the_folder(root: Path, output: str):
    text = "trainer: {stage: rl, total_training_steps: 3}\n"
    RunDirectory.create(root / "p" / "a", config=text, provenance={}, manifest={})
    with serving(root) as client:
        reply = client.post("/exports", {"run_id": client.only_run(), "output": output})
        assert reply.status == 422, reply.body
        assert client.get("/jobs")["jobs"] == []


def test_the_run_of_another_user_is_resumed_and_exported_with_trust_alone(root: Path):
    text = "trainer: {stage: rl, total_training_steps: 3, plugins: [evil.py]}\n"
    RunDirectory.create(root / "p" / "a", config=text, provenance={}, manifest={})
    with serving(root) as client:
        run_id = client.only_run()
        for reply in (
            client.post(f"/runs/{run_id}/resume", {}),
            client.post("/exports", {"run_id": run_id, "output": "x"}),
        ):
            assert reply.status == 422
            assert "not known to be yours" in reply.json["error"]["message"]
        assert client.get("/jobs")["jobs"] == []
    with serving(root, is_trusting=True) as client:
        reply = client.post("/exports", {"run_id": client.only_run(), "output": "x"})
        assert reply.status == 200
        assert reply.json["command"].endswith("--trust")
        assert settled(client, reply.json["id"])["state"] == "failed"


def test_a_disk_that_is_full_for_a_while_stops_neither_queue_nor_scan(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    tick, failed = JobQueue.tick, list[int]()

    def full(queue: JobQueue) -> None:
        if len(failed) < 2:
            failed.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        tick(queue)

    monkeypatch.setattr(JobQueue, "tick", full)
    with serving(root) as client:
        until(lambda: len(failed) == 2, seconds=60)
        made = RunDirectory(root / "p" / "later").root
        shutil.copytree(Path(__file__).parents[2] / "data" / "old_run", made)
        until(lambda: client.get("/runs")["runs"], seconds=60)
