"""What the routes that act answer: they start and stop processes.

A read-only studio has none of them. The web framework is that of `luyen.web`; here are bodies of
requests and plain functions.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, final

from annotated_types import Ge, Le
from pydantic import BaseModel, Field

from luyen.studio.actions.chats import Chats, sources
from luyen.studio.actions.job_queue import JobQueue
from luyen.studio.screens.folder import Refusal
from luyen.studio.screens.server_cache import Studio

_MOST_TEXT = 2**20
Overrides = Annotated[list[str], Field(max_length=200)]
Tail = Annotated[int, Ge(1), Le(5000)]


@final
class CheckRequest(BaseModel):
    """The body of a check."""

    yaml: str
    overrides: Overrides = Field(default_factory=list[str])


@final
class JobRequest(BaseModel):
    """The body that starts a run."""

    yaml: str = Field(max_length=_MOST_TEXT)
    name: str = Field("", max_length=200)
    overrides: Overrides = Field(default_factory=list[str])


@final
class ResumeRequest(BaseModel):
    """The body that resumes a run."""

    overrides: Overrides = Field(default_factory=list[str])


@final
class ReplayRequest(BaseModel):
    """The body that replays a step."""

    step: int = Field(ge=1)


@final
class ExportRequest(BaseModel):
    """The body that exports a checkpoint."""

    run_id: str
    step: int | None = Field(None, ge=0)
    output: str = Field(min_length=1, max_length=1000)


@final
class ServeRequest(BaseModel):
    """The body that starts a server of a checkpoint; port 0 takes any that is free."""

    run_id: str
    step: int | None = Field(None, ge=0)
    port: int = Field(0, ge=0, le=65535)


@final
class ChatSource(BaseModel):
    """A checkpoint to talk with, as `/chats/sources` lists it; `tools`: with those of its run."""

    run_id: str
    step: int = Field(ge=0)
    tools: bool = False


@final
class ChatServer(BaseModel):
    """A served model to talk with; `api_key_env` names the variable that holds the key."""

    url: str = Field(min_length=1, max_length=2000)
    model: str | None = Field(None, max_length=500)
    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)

    def words(self) -> list[str]:
        """Arguments of the process that asks it."""
        pairs = (("url", self.url), ("model", self.model), ("api-key-env", self.api_key_env))
        return [f"--{name}={value}" for name, value in pairs if value]


@final
class ChatRequest(BaseModel):
    """The body that begins a chat."""

    sources: list[ChatSource | ChatServer] = Field(min_length=1, max_length=2)


@final
class MessageRequest(BaseModel):
    """A message of a chat."""

    message: str = Field(min_length=1, max_length=200_000)
    temperature: float = Field(0.0, ge=0.0, le=10.0, allow_inf_nan=False)
    max_tokens: int = Field(256, ge=1, le=4096)


@final
class PreviewRequest(BaseModel):
    """The body that asks for rows of a configuration."""

    yaml: str = Field(max_length=_MOST_TEXT)
    split: Literal["train", "validation"] = "train"
    limit: int = Field(8, ge=1, le=100)


@final
class ActingRoutes:
    """Answers of the acting part of the API."""

    def __init__(self, studio: Studio, jobs: JobQueue, chats: Chats) -> None:
        self._studio = studio
        self._chats = chats
        self.jobs = jobs

    def reads(self) -> dict[str, Callable[..., Any]]:
        """Path -> what answers a GET."""
        return {
            "/jobs": self.list_jobs,
            "/jobs/{job_id}/log": self.job_log,
            "/chats/sources": self.chat_sources,
        }

    def changes(self) -> dict[str, Callable[..., Any]]:
        """Path -> what answers a POST."""
        return {
            "/jobs": self.start_run,
            "/jobs/{job_id}/stop": self.stop_job,
            "/jobs/{job_id}/cancel": self.cancel_job,
            "/runs/{run_id}/resume": self.resume_run,
            "/runs/{run_id}/replay": self.replay_step,
            "/exports": self.export,
            "/servers": self.serve,
            "/data/preview": self.preview_rows,
            "/chats": self.open_chat,
            "/chats/{chat_id}/close": self.close_chat,
        }

    def tick(self) -> None:
        """What is to be done every few seconds."""
        self.jobs.tick()
        self._chats.tick()

    def close(self) -> None:
        """End what belongs to the studio; jobs do not."""
        self.jobs.close()
        self._chats.close()

    def list_jobs(self) -> Any:
        """The jobs, the newest first, and how many may run at once."""
        return {"jobs": self.jobs.rows(), "running_limit": self.jobs.limit}

    def start_run(self, body: JobRequest) -> Any:
        """Queue a run of a configuration that `luyen check` finds sound."""
        return self.jobs.start_run(body.yaml, body.name, body.overrides)

    def job_log(self, job_id: str, tail: Tail = 200) -> Any:
        """The last lines that a job printed."""
        return {"lines": self.jobs.log(job_id, tail)}

    def stop_job(self, job_id: str) -> Any:
        """Ask a running job to end; a run writes a checkpoint first."""
        return self.jobs.stop(job_id)

    def cancel_job(self, job_id: str) -> Any:
        """Take a waiting job out of the queue."""
        return self.jobs.cancel(job_id)

    def resume_run(self, run_id: str, body: ResumeRequest) -> Any:
        """Queue the continuation of a run."""
        return self.jobs.resume_run(self._studio.run(run_id), body.overrides)

    def replay_step(self, run_id: str, body: ReplayRequest) -> Any:
        """Queue a replay of a step, which measures log-probability and entropy of its tokens."""
        return self.jobs.replay(self._studio.run(run_id), body.step)

    def export(self, body: ExportRequest) -> Any:
        """Queue the export of a checkpoint to a new directory below the folder."""
        return self.jobs.export(self._studio.run(body.run_id), body.step, body.output)

    def serve(self, body: ServeRequest) -> Any:
        """Start an OpenAI-compatible server of a checkpoint, as a job until it is stopped."""
        return self.jobs.serve(self._studio.run(body.run_id), body.step, body.port)

    def preview_rows(self, body: PreviewRequest) -> Any:
        """The first rows of a configuration with the tokens that are learned."""
        from luyen.studio.screens.new_run import check_text  # loads all rules

        report = check_text(body.yaml, ())
        findings = report["findings"]
        if "config" not in report:  # it is no configuration: no process need say so
            raise Refusal(422, findings[0]["message"], field="yaml", fix=findings[0]["fix"])
        with tempfile.TemporaryDirectory(prefix="luyen-studio-") as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(body.yaml)
            module = "luyen.studio.actions.data_preview"
            command = [sys.executable, "-P", "-m", module, str(file), body.split, str(body.limit)]
            done = self._studio.run_process(command)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
            raise Refusal(422, f"the rows cannot be read: {last[0][:500]}", field="yaml")
        page = json.loads(done.stdout)
        error = page.pop("error", None)
        if error is not None:
            raise Refusal(422, error["message"], field=error["field"], fix=error["fix"])
        about = [one for one in findings if str(one["key"]).startswith("data")]
        return {**page, "findings": about}

    def chat_sources(self) -> Any:
        """Checkpoints to talk with, and models that jobs serve."""
        served = [
            {"kind": "url", "label": f"{job['name']}, {job['url']}", "url": job["url"]}
            for job in self.jobs.rows()
            if job["url"] is not None
        ]
        return [*served, *sources(self._studio.folder)]

    def open_chat(self, body: ChatRequest) -> Any:
        """Begin a chat with one checkpoint or served model, or with two side by side."""
        chats = self._chats
        words = [
            chats.checkpoint_words(one.run_id, one.step, has_tools=one.tools)
            if isinstance(one, ChatSource)
            else one.words()
            for one in body.sources
        ]
        return {"id": chats.open(words)}

    def say(self, chat_id: str, body: MessageRequest) -> Iterator[bytes]:
        """Server-sent events of the answers to a message."""
        return self._chats.say(chat_id, body.model_dump())

    def close_chat(self, chat_id: str) -> Any:
        """End a chat."""
        self._chats.close(chat_id)
        return {"closed": chat_id}
