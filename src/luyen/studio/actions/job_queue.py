"""The queue of jobs: starts the oldest while fewer run than may, and says where each one stands.

Everything is on disk (`job_files`). A studio that is started again, also after `kill -9`, finds
jobs that run and jobs that wait; a job is a session of its own, which no end of a studio reaches.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from luyen.base.files import open_regular
from luyen.base.rundir import RunDirectory, step_name
from luyen.base.secrets import masked
from luyen.studio.actions.job_files import JobFiles, JobRecord, State, ended, new_id
from luyen.studio.screens.folder import KnownRun, Refusal, RunFolder, token_file
from luyen.studio.screens.records import log_lines

_START_S = 60.0
"""Seconds after which a process that has noted nothing did not start."""
_ERROR_LINES = 2000
_MOST_SHOWN = 500
_MOST_SERVERS = 4
_ADDRESS = re.compile(r"http://\S+/v1$")
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@final
class JobQueue:
    """Jobs over a folder of runs; safe to use from several threads."""

    def __init__(self, folder: RunFolder, *, limit: int, is_trusting: bool) -> None:
        self.limit = limit
        self._folder = folder
        self._is_trusting = is_trusting
        self._files = JobFiles(folder.root)
        self._lock = threading.RLock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start_run(self, text: str, name: str, overrides: Sequence[str]) -> dict[str, Any]:
        """Queue a run of a configuration that `check` finds sound; a refusal otherwise."""
        self._demand_folder()
        job_id, name = new_id(), name.strip()
        last = [f"trainer.default_local_dir={json.dumps(str(self._folder.root))}"]
        if name:
            last.append(f"trainer.experiment_name={json.dumps(name)}")
        from luyen.studio.screens.new_run import check_text  # loads all rules

        report = check_text(text, [*overrides, *last])
        if not report["ok"]:
            first = next(one for one in report["findings"] if one["level"] == "error")
            raise Refusal(422, first["message"], field=first["key"], fix=first["fix"])
        trainer = report["config"]["trainer"]
        if not name:  # the name of a run without one has the time in it: it is fixed here
            last.append(f"trainer.experiment_name={json.dumps(trainer['experiment_name'])}")
        place = self._below(Path(trainer["project_name"]) / trainer["experiment_name"])
        words = ("train", str(self._files.config(job_id)), *overrides, *last)
        steps = trainer.get("total_training_steps")
        record = JobRecord(id=job_id, name=name or trainer["experiment_name"], words=words,
                           folder=str(Path.cwd()), created=_now(), run=place,
                           total_steps=steps if isinstance(steps, int) else None)  # fmt: skip
        return self._add(record, text)

    def resume_run(self, known: KnownRun, overrides: Sequence[str]) -> dict[str, Any]:
        """Queue the continuation of a run."""
        self._demand_folder()
        if known.row["state"] == "running":
            raise Refusal(409, "the run is being trained", field="run", fix="stop it first")
        self._demand_trust(known)
        words = ["train", "--resume", str(known.directory.root), *overrides]
        record = JobRecord(id=new_id(), name=known.row["name"], words=self._trusted(words),
                           folder=str(Path.cwd()), created=_now(), run=known.row["path"],
                           total_steps=known.row["total_steps"])  # fmt: skip
        return self._add(record, None)

    def export(self, known: KnownRun, step: int | None, output: str) -> dict[str, Any]:
        """Queue the export of a checkpoint to a new directory below the folder of runs."""
        self._demand_folder()
        self._demand_trust(known)
        target = self._folder.root / self._below(Path(output))
        source = known.directory.root
        if step is not None:
            source = checkpoint_of(known, step)
        words = self._trusted(["export", str(source), str(target)])
        record = JobRecord(id=new_id(), name=f"export {known.row['name']}", words=words,
                           folder=str(Path.cwd()), created=_now())  # fmt: skip
        return self._add(record, None)

    def replay(self, known: KnownRun, step: int) -> dict[str, Any]:
        """Queue a replay of a step that measures its tokens for the screen of its rollouts."""
        self._demand_folder()
        self._demand_trust(known)
        target = token_file(self._folder.root, known, step)
        words = ["replay", str(known.directory.root), "--step", str(step), "--tokens", str(target)]
        record = JobRecord(id=new_id(), name=f"replay {known.row['name']}, step {step}",
                           words=self._trusted(words), folder=str(Path.cwd()),
                           created=_now())  # fmt: skip
        return self._add(record, None)

    def serve(self, known: KnownRun, step: int | None, port: int) -> dict[str, Any]:
        """Start a server of a checkpoint at the loopback address, until it is stopped."""
        self._demand_folder()
        self._demand_trust(known)
        source = known.directory.root if step is None else checkpoint_of(known, step)
        running = [one for one in self.rows() if one["is_server"] and one["state"] == "running"]
        if len(running) >= _MOST_SERVERS:
            raise Refusal(409, f"{len(running)} servers run", field="run_id", fix="stop one")
        words = self._trusted(["serve", str(source), "--port", str(port)])
        record = JobRecord(id=new_id(), name=f"serve {known.row['name']}", words=words,
                           folder=str(Path.cwd()), created=_now(), is_server=True)  # fmt: skip
        return self._add(record, None)

    def rows(self) -> list[dict[str, Any]]:
        """The jobs, the newest first."""
        return [self._row(record) for record in self._files.records()[:_MOST_SHOWN]]

    def log(self, job_id: str, tail: int) -> list[str]:
        """The last lines that a job printed."""
        return log_lines(self._files.log(self._get(job_id).id), tail)

    def log_of_run(self, path: str, tail: int) -> list[str] | None:
        """The last lines of the newest job of a run; None where it has none."""
        found = next((one for one in self._files.records() if one.run == path), None)
        return None if found is None else log_lines(self._files.log(found.id), tail)

    def stop(self, job_id: str) -> dict[str, Any]:
        """Ask a job to end; a run writes a checkpoint first."""
        with self._lock, self._files.locked():
            record = self._settled(self._get(job_id))
            if record.state != "running":
                raise Refusal(409, f"the job is {record.state}", field="id")
            process = self._files.process(job_id)
            if process is None:
                fix = "ask again in some seconds"
                raise Refusal(409, "its process is only just starting", field="id", fix=fix)
            record = replace(record, is_stopping=True)
            self._files.write(record)
            if process[1]:
                os.kill(process[0], signal.SIGTERM)
        return self._row(record)

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Take a job out of the queue."""
        with self._lock, self._files.locked():
            record = self._settled(self._get(job_id))
            if record.state != "queued":
                raise Refusal(409, f"the job is {record.state}", field="id", fix="stop it instead")
            record = ended(record, "stopped")
            self._files.write(record)
        return self._row(record)

    def tick(self) -> None:
        """Note which jobs have ended, and start those whose turn it is."""
        with self._lock:
            self._children = {n: one for n, one in self._children.items() if one.poll() is None}
            open_jobs = [one for one in self._files.records() if one.state in ("queued", "running")]
            if not open_jobs:
                return
            with self._files.locked():
                known = [self._settled(self._get(one.id)) for one in reversed(open_jobs)]
                running = sum(one.state == "running" and not one.is_server for one in known)
                for record in known:
                    if record.state == "queued" and (record.is_server or running < self.limit):
                        self._start(record)
                        running += not record.is_server

    def close(self) -> None:
        """Leave the jobs to themselves."""
        with self._lock:
            for child in self._children.values():
                child.returncode = 0  # it goes on, and is none of this process any more
            self._children.clear()

    def _demand_folder(self) -> None:
        if RunDirectory(self._folder.root).exists:
            fix = "start the studio over the folder of runs"
            raise Refusal(409, "the studio shows one run, and jobs belong to a folder", fix=fix)

    def _demand_trust(self, known: KnownRun) -> None:
        from luyen.config.trust import require_trust  # loads the schema of a run

        require_trust(known.directory, is_trusted=self._is_trusting)

    def _trusted(self, words: list[str]) -> tuple[str, ...]:
        return (*words, "--trust") if self._is_trusting else tuple(words)

    def _below(self, path: Path) -> str:
        """The path below the folder of runs; a refusal for any other."""
        root = self._folder.root
        try:
            place = (root / path).resolve().relative_to(root)
        except (ValueError, OSError, RuntimeError):
            fix = f"give a path below {root}"
            raise Refusal(422, f"{path}: it is outside of the folder", field="path",
                          fix=fix) from None  # fmt: skip
        if not place.parts or place.parts[0].startswith("."):
            raise Refusal(422, f"{path}: the studio keeps its own files there", field="path")
        return place.as_posix()

    def _add(self, record: JobRecord, text: str | None) -> dict[str, Any]:
        with self._lock, self._files.locked():
            for other in self._files.records():
                if record.run is not None and other.run == record.run and (
                    self._settled(other).state in ("queued", "running")
                ):  # fmt: skip
                    message = f"a job of the run {record.run} is {other.state}"
                    raise Refusal(409, message, field="name", fix="give another name")
            if text is not None:
                digest = self._files.write_config(record.id, text)
                record = replace(record, digest=digest)
            self._files.write(record)
        self.tick()
        return self._row(self._get(record.id))

    def _get(self, job_id: str) -> JobRecord:
        record = self._files.read(job_id)
        if record is None:
            raise Refusal(404, "there is no such job", field="id")
        return record

    def _start(self, record: JobRecord) -> None:
        if not self._files.has_config_of(record):
            self._files.write(ended(record, "failed", "its configuration was changed or removed"))
            return
        # Noted before the process exists: a studio that is killed here starts no job twice.
        self._files.write(replace(record, state="running", started=time.time()))
        log = open_regular(self._files.log(record.id), os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                           0o600)  # fmt: skip
        module = "luyen.studio.actions.job_process"
        command = [sys.executable, "-P", "-m", module, str(self._folder.root), record.id]
        try:
            self._children[record.id] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=record.folder,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        except OSError as error:
            self._files.write(ended(record, "failed", f"it cannot be started: {error}"))
        finally:
            os.close(log)

    def _settled(self, record: JobRecord) -> JobRecord:
        """The record, with the end of its process where there was one."""
        if record.state != "running":
            return record
        code = self._files.exit_code(record.id)
        process = self._files.process(record.id)
        if code is None and (process[1] if process else self._is_starting(record)):
            return record
        state: State = "failed"
        if code == 0 and not (record.is_server and record.is_stopping):
            state = "finished"
        elif record.is_stopping or code in _STOPPED:
            state = "stopped"
        error = None
        if state == "failed":
            error = self._first_error(record.id) or "its process ended without a word"
        record = ended(record, state, error)
        self._files.write(record)
        return record

    def _is_starting(self, record: JobRecord) -> bool:
        child = self._children.get(record.id)
        if child is not None:
            return child.poll() is None
        return time.time() - (record.started or 0.0) < _START_S

    def _first_error(self, job_id: str) -> str | None:
        lines = [line.strip() for line in log_lines(self._files.log(job_id), _ERROR_LINES)]
        said = [line for line in lines if line]
        named = [line for line in said if line.lower().startswith("error")]
        wrong = named or [line for line in said if "Error" in line] or said[-1:]
        return wrong[0][:500] if wrong else None

    def _row(self, record: JobRecord) -> dict[str, Any]:
        run_id, step, total = None, None, record.total_steps
        if record.run is not None:
            run_id = self._folder.find(self._folder.root / record.run)
        if run_id is not None and record.state != "queued":
            row = self._folder.get(run_id, is_read=False).row
            step, total = row["step"], row["total_steps"] or total
        return {
            "id": record.id,
            "name": record.name,
            "state": record.state,
            "run_id": run_id,
            "step": step,
            "total_steps": total,
            "created": record.created,
            "command": shlex.join(["luyen", *map(masked, record.words)]),
            "error": record.error,
            "is_server": record.is_server,
            "url": self._address(record),
        }

    def _address(self, record: JobRecord) -> str | None:
        """Where a server answers; None before it says so, and for other jobs."""
        if not record.is_server or record.state != "running":
            return None
        lines = log_lines(self._files.log(record.id), _ERROR_LINES)
        found = (_ADDRESS.search(line) for line in lines if line.startswith("serving "))
        return next((one[0] for one in found if one is not None), None)


def checkpoint_of(known: KnownRun, step: int) -> Path:
    """The checkpoint of a step; a refusal where the run has none."""
    place = known.directory.root / "checkpoints" / step_name(step)
    if not place.is_dir():
        raise Refusal(404, f"the run has no checkpoint of step {step}", field="step")
    return place


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
