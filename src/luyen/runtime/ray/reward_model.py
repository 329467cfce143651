"""Replicas of the reward model as Ray actors, which score shards of the conversations.

A lost replica is restarted and called again: its weights come from the same files and its scores
have the same bits, so the result does not change.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import ray
from ray.exceptions import RayError, RayTaskError

from luyen.base.errors import UserError
from luyen.base.heartbeat import HEART
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.engine.batch import balance_by_tokens
from luyen.rewards.reward_model import ModelInput, Scorer
from luyen.runtime.monitoring import CallResult, RoleMonitor, device_bytes, unwrap_result
from luyen.runtime.ray.health import (
    PROCESS_GONE,
    HealthCheck,
    exit_with_parent,
    failure_reason,
    traceback_of,
)
from luyen.runtime.ray.messages import RemoteError
from luyen.telemetry.worker_spans import WORK

MakeScorer: TypeAlias = Callable[[], Scorer]
"""Loads the model, in the process of a replica."""
ROLE = "reward_model"
_FIELD = "reward.reward_model.rollout.data_parallel_size"
_POLL_S = 1.0
_MAX_FAILURES = 3
"""Consecutive losses that end the run."""


@final
class RewardProcess:
    """The process of one replica."""

    def __init__(self, make: MakeScorer, *, folder: str) -> None:
        exit_with_parent()
        os.chdir(folder)
        self._make = make
        self._scorer: Scorer | None = None
        self._node = ray.get_runtime_context().get_node_id()
        WORK.device_bytes = device_bytes

    @ray.method(concurrency_group="life")
    def alive(self) -> int:
        """Heartbeats of this process so far; answered also during another call."""
        return HEART.count

    def score(self, inputs: Sequence[ModelInput]) -> CallResult:
        """Scores of these inputs; the first call loads the model, even without inputs."""
        came = time.time()
        with WORK.span("score"):
            self._scorer = self._scorer or self._make()
            value = self._scorer.score(inputs) if inputs else []
        return CallResult(value=value, report=WORK.report(node=self._node, came=came))

    def pid(self) -> int:
        """Process id."""
        return os.getpid()


@final
class RayScorer:
    """All replicas as one scorer. After `close` it cannot be used."""

    is_remote = True

    def __init__(
        self,
        make: MakeScorer,
        *,
        places: Sequence[Mapping[str, Any]],
        watch: RoleMonitor | None = None,
        timeouts: TimeoutsConfig | None = None,
    ) -> None:
        """Start one replica for each place (options of an actor); returns when all have loaded."""
        self._make = ray.put(make)
        self._places = places
        self._watch = watch or RoleMonitor()
        self._timeouts = timeouts or TimeoutsConfig()
        self.restarts = 0
        """Restarts of replicas."""
        self._actors: list[Any] = [self._begin(copy) for copy in range(len(places))]
        self._call_all([()] * len(places))

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas."""
        return ray.get([actor.pid.remote() for actor in self._actors])

    def score(self, inputs: Sequence[ModelInput]) -> list[tuple[float, ...]]:
        """For each input the score of every token in `ModelInput.judged`, in order."""
        prompts = {one.tokens[: one.prompt]: None for one in inputs}
        labels = {prompt: number for number, prompt in enumerate(prompts)}
        groups = [labels[one.tokens[: one.prompt]] for one in inputs]
        shards = balance_by_tokens(
            [len(one.tokens) for one in inputs], groups, ranks=len(self._actors)
        )
        answers = self._call_all([[inputs[i] for i in shard] for shard in shards])
        found: dict[int, tuple[float, ...]] = {}
        for shard, scores in zip(shards, answers, strict=True):
            found |= dict(zip(shard, scores, strict=True))
        return [found[i] for i in range(len(inputs))]

    def close(self) -> None:
        """End every replica. Closing twice is allowed."""
        for actor in self._actors if ray.is_initialized() else ():
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _begin(self, copy: int) -> Any:
        remote: Any = ray.remote
        kind = remote(concurrency_groups={"life": 1})(RewardProcess)
        options = kind.options(max_restarts=0, **self._places[copy])
        return options.remote(self._make, folder=os.getcwd())

    def _call_all(self, shards: Sequence[Sequence[ModelInput]]) -> list[Any]:
        """Scores by replica; a replica that is lost is restarted and called again."""
        answers: list[Any] = [None] * len(shards)
        left, deaths = list(range(len(shards))), 0
        while left:
            lost = self._call_some(left, shards, answers)
            left, deaths = list(lost), deaths + 1 if lost else 0
            for copy, why in lost.items():
                self._replace(copy, why, deaths)
        return answers

    def _call_some(
        self, copies: Sequence[int], shards: Sequence[Sequence[ModelInput]], answers: list[Any]
    ) -> dict[int, str]:
        """Call these replicas; those that were lost, with the reason."""
        sent = time.time()
        calls = {self._actors[copy].score.remote(shards[copy]): copy for copy in copies}
        pings = [self._actors[copy].alive.remote for copy in copies]
        health = HealthCheck(pings, self._timeouts)
        lost: dict[int, str] = {}
        while calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=_POLL_S)
            for one in done:
                copy = calls.pop(one)
                try:
                    answer = ray.get(one)
                except RayError as error:
                    lost[copy] = self._reason(error, copy)
                    continue
                answers[copy] = unwrap_result(
                    answer, self._watch, ROLE, copy, sent=sent, back=time.time()
                )
            if not done:
                health.gone()
                silent = {copies[place]: s for place, s in health.silent().items()}
                for one, copy in [(o, c) for o, c in calls.items() if c in silent]:
                    lost[copy] = f"it gave no sign of life for {silent[copy]:.0f} s"
                    del calls[one]
        return lost

    def _reason(self, error: RayError, copy: int) -> str:
        """Why a replica was lost; raises an exception of its code."""
        if isinstance(error, PROCESS_GONE):
            return failure_reason(error)
        self.close()
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, UserError):
                raise error.cause
            raise RemoteError(f"copy {copy} of the reward model", traceback_of(error))
        raise error

    def _replace(self, copy: int, why: str, deaths: int) -> None:
        ray.kill(self._actors[copy], no_restart=True)
        if deaths >= _MAX_FAILURES:
            self.close()
            said = f"copy {copy} of the reward model was lost {deaths} times in a row: {why}"
            fix = "check its memory and the logs of its node; the run can be resumed"
            raise UserError(_FIELD, len(self._places), said, fix)
        self.restarts += 1
        self._actors[copy] = self._begin(copy)
