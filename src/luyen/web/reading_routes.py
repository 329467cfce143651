"""The routes of the studio that read: a method each, whose signature is what the query may hold.

What they answer comes from plain functions of `luyen.studio.screens`; blocking ones run in the
threads of the web framework.
"""

import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Annotated, Any, Literal, final

from fastapi import Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from luyen import __version__
from luyen.studio.actions.routes import ActingRoutes, CheckRequest
from luyen.studio.screens import overview, records
from luyen.studio.screens.live import LiveEvents, json_bytes
from luyen.studio.screens.server_cache import Studio

Names = Annotated[list[str], Query()]
Tail = Annotated[int, Query(ge=1, le=5000)]
Split = Literal["train", "validation"]
_FIRST_SCAN_S = 0.7
_JSON = "application/json"


@final
class SharedReplies:
    """Replies that tabs which ask for the same at the same time share; for several threads.

    Every tab that follows a run renews its screen upon the same event. An answer is computed for
    the first of them and once more for all that came during it: an answer is never older than its
    request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[bytes | None]] = {}
        self._next: dict[Hashable, Future[bytes | None]] = {}

    def reply(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """What `make` returns as JSON; of those who wait for the same, one computes it."""
        mine: Future[bytes | None] = Future()
        with self._lock:
            running = self._running.get(key)
            if running is None:
                self._running[key] = mine
                waited = mine
            else:
                waited = self._next.setdefault(key, mine)
        if waited is not mine:
            # None: the one who computed it failed, so that this one finds out by itself.
            shared = waited.result()
            return Response(json_bytes(make()) if shared is None else shared, media_type=_JSON)
        if running is not None:
            running.result()
            with self._lock:
                self._running[key] = self._next.pop(key)
        return Response(self._computed(key, mine, make), media_type=_JSON)

    def _computed(
        self, key: Hashable, mine: "Future[bytes | None]", make: Callable[[], Any]
    ) -> bytes:
        found: bytes | None = None
        try:
            found = json_bytes(make())
            return found
        finally:
            with self._lock:
                if self._running.get(key) is mine:
                    del self._running[key]
            mine.set_result(found)


@final
class RolloutQuery(BaseModel):
    """The query of the table of rollouts."""

    split: Split = "train"
    start: int | None = None
    end: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    stop: str | None = None
    fault: str | None = None
    tool: str | None = None
    group: str | None = None
    text: str | None = None
    sort: Literal["step", "reward", "length", "advantage"] = "step"
    order: Literal["asc", "desc"] = "desc"
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = None


@final
class ReadingRoutes:
    """Answers of the reading part of the API."""

    def __init__(self, studio: Studio, acting: ActingRoutes | None) -> None:
        self._studio = studio
        self._acting = acting
        self._live = LiveEvents(studio)
        self._shared = SharedReplies()

    def table(self) -> dict[str, Callable[..., Any]]:
        """Path -> what answers it."""
        run = "/runs/{run_id}"
        return {
            "/session": self.session,
            "/runs": self.runs,
            run: self.run,
            f"{run}/metrics": self.metrics,
            f"{run}/series": self.series,
            f"{run}/faults": self.faults,
            f"{run}/plan": self.plan,
            f"{run}/log": self.log,
            f"{run}/rollouts": self.rollouts,
            run + "/rollouts/{split}/{step}/{index}": self.rollout,
            run + "/groups/{split}/{step}/{group}": self.group,
            f"{run}/rewards": self.rewards,
            f"{run}/parity": self.parity,
            f"{run}/timeline": self.timeline,
            "/compare": self.compare,
            "/schema": self.schema,
            "/recipes": self.recipes,
        }

    def session(self) -> Any:
        """The folder, the version and what may be done."""
        return {
            "folder": str(self._studio.folder.root),
            "version": __version__,
            "read_only": self._studio.options.is_read_only,
            "trust": self._studio.options.is_trusting,
            "acting": self._acting is not None,
            "languages": ["en", "vi"],
        }

    def runs(self) -> Any:
        """Every run of the folder, the newest first."""
        rows, is_whole = self._studio.folder.rows(wait_s=_FIRST_SCAN_S)
        return {"runs": rows, "is_whole": is_whole}

    def run(self, run_id: str) -> Any:
        """Verdict, findings, headline numbers and time of a run."""
        return self._shared.reply(("run", run_id), lambda: overview.overview(self._studio, run_id))

    def metrics(self, run_id: str) -> Any:
        """Names and meanings of the metrics of a run."""
        return records.metric_names(self._studio, run_id)

    def series(
        self,
        run_id: str,
        name: Names = [],  # noqa: B006 - FastAPI copies it
        points: int = 800,
        start: int | None = None,
        end: int | None = None,
    ) -> Any:
        """Curves in buckets: mean, minimum and maximum."""
        from luyen.studio.screens import curves  # the index of rollouts loads pyarrow

        given = {"points": points, "start": start, "end": end}
        return self._shared.reply(
            ("series", run_id, *name, *given.values()),
            lambda: curves.metric_series(self._studio, run_id, name, **given),
        )

    def faults(self, run_id: str) -> Any:
        """Attempts, resumptions, notes and the chain of digests."""
        return records.faults(self._studio, run_id)

    def plan(self, run_id: str) -> Any:
        """The configuration, the source of each key, and the memory plan."""
        return records.plan(self._studio, run_id)

    def rollouts(
        self,
        run_id: str,
        wanted: Annotated[RolloutQuery, Query()],
    ) -> Any:
        """A page of the table of rollouts, filtered and sorted."""
        from luyen.studio.screens import rollout_query

        given = wanted.model_dump(exclude={"split", "order", "limit", "cursor"})
        named: dict[str, Any] = {
            name: value if value != "" else None for name, value in given.items()
        }
        return self._shared.reply(
            ("rollouts", run_id, wanted.model_dump_json()),
            lambda: rollout_query.table_page(
                self._studio.rollouts(self._studio.run(run_id), wanted.split),
                rollout_query.RolloutFilter(**named, is_ascending=wanted.order == "asc"),
                split=wanted.split,
                limit=wanted.limit,
                cursor=wanted.cursor,
                text=self._studio.text(self._studio.run(run_id)),
            ),
        )

    def rollout(self, run_id: str, split: Split, step: int, index: int) -> Any:
        """One rollout: conversation, every token, reward tree, tool calls, siblings."""
        from luyen.studio.screens import rollout_view

        known = self._studio.run(run_id)
        found, text = self._studio.rollouts(known, split), self._studio.text(known)
        place = {"split": split, "step": step, "row": index}
        folder = self._studio.folder.root
        return rollout_view.rollout_page(known, found, **place, text=text, folder=folder)

    def group(self, run_id: str, split: Split, step: int, group: str) -> Any:
        """The rollouts of a group, and why it teaches nothing where it does not."""
        from luyen.studio.screens import rollout_view

        known = self._studio.run(run_id)
        found, text = self._studio.rollouts(known, split), self._studio.text(known)
        return rollout_view.group_page(found, split=split, step=step, group=group, text=text)

    def rewards(self, run_id: str) -> Any:
        """Components of the reward over time, and faults."""
        from luyen.studio.screens import rewards

        return self._shared.reply(
            ("rewards", run_id), lambda: rewards.rewards(self._studio, run_id)
        )

    def parity(self, run_id: str) -> Any:
        """The gap between sampler and trainer, and the tokens with the largest."""
        from luyen.studio.screens import comparisons

        return self._shared.reply(
            ("parity", run_id), lambda: comparisons.parity(self._studio, run_id)
        )

    def timeline(self, run_id: str, start: int | None = None, end: int | None = None) -> Any:
        """Roles as lanes, with their spans in some steps."""
        from luyen.studio.screens import comparisons

        return self._shared.reply(
            ("timeline", run_id, start, end),
            lambda: comparisons.timeline(self._studio, run_id, start=start, end=end),
        )

    def compare(self, id: Names = []) -> Any:  # noqa: B006 - the name of the query
        """Runs side by side: keys that differ, common metrics, first divergence."""
        from luyen.studio.screens import comparisons

        return comparisons.compare(self._studio, id)

    def schema(self) -> Any:
        """The JSON schema of the configuration, and the documentation of every key."""
        from luyen.studio.screens.new_run import schema_page

        return schema_page()

    def recipes(self) -> Any:
        """Configurations to begin with."""
        from luyen.studio.screens.new_run import recipes

        return recipes()

    def check(self, body: CheckRequest) -> Any:
        """What `luyen check` finds in a configuration."""
        from luyen.studio.screens.new_run import check_text

        return check_text(body.yaml, body.overrides)

    async def run_events(self, run_id: str) -> Response:
        """Changes of a run as server-sent events."""
        return event_stream(await self._live.of_run(run_id))

    async def folder_events(self) -> Response:
        """Rows of the list that changed, as server-sent events."""
        return event_stream(await self._live.of_folder())

    def close(self) -> None:
        """End the streams, and what belongs to the studio."""
        self._live.close()
        if self._acting is not None:
            self._acting.close()

    def log(self, run_id: str, tail: Tail = 200) -> Any:
        """The last lines that the job of a run printed; its notes where it has no job."""
        lines = None
        if self._acting is not None:
            lines = self._acting.jobs.log_of_run(self._studio.run(run_id).row["path"], tail)
        if lines is not None:
            return {"lines": lines, "source": "job"}
        return records.run_log(self._studio, run_id, tail=tail)


def event_stream(pieces: AsyncIterator[bytes] | Iterator[bytes]) -> Response:
    """Server-sent events as a reply."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)
