"""Copies of the reward model as Ray actors, among which conversations are dealt.

A copy that is lost is begun again in its place and asked again: its weights come from the same
files and its scores have the same bits, so nothing else notices.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import ray
from ray.exceptions import RayError, RayTaskError

from luyen.base.errors import UserError
from luyen.base.heartbeat import HEART
from luyen.engine.batch_shards import balance_by_tokens
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
from luyen.runtime.ray.ranks import SILENCE_S, START_S
from luyen.telemetry.worker_spans import WORK

MakeScorer: TypeAlias = Callable[[], Scorer]
"""Loads the model, in the process of a copy."""
ROLE = "reward_model"
_FIELD = "reward.reward_model.rollout.data_parallel_size"
_LOOK_S = 1.0
_DEATHS = 3
"""Losses in a row that end the run."""


@final
class RewardProcess:
    """The process of one copy."""

    def __init__(self, make: MakeScorer, *, folder: str) -> None:
        exit_with_parent()
        os.chdir(folder)
        self._make = make
        self._scorer: Scorer | None = None
        self._node = ray.get_runtime_context().get_node_id()
        WORK.device_bytes = device_bytes

    @ray.method(concurrency_group="life")
    def alive(self) -> int:
        """Beats of this process so far; it answers whatever else it is doing."""
        return HEART.count

    def score(self, inputs: Sequence[ModelInput]) -> CallResult:
        """Scores of these inputs; the model is loaded when it is first asked, even for nothing."""
        came = time.time()
        with WORK.span("score"):
            self._scorer = self._scorer or self._make()
            value = self._scorer.score(inputs) if inputs else []
        return CallResult(value=value, report=WORK.report(node=self._node, came=came))

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


@final
class RayScorer:
    """All copies, as one scorer. After `close` nothing can be asked of them."""

    is_remote = True

    def __init__(
        self,
        make: MakeScorer,
        *,
        places: Sequence[Mapping[str, Any]],
        watch: RoleMonitor | None = None,
        start_s: float = START_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """One copy for each place (options of an actor); returns when all have loaded."""
        self._make = ray.put(make)
        self._places = places
        self._watch = watch or RoleMonitor()
        self._timeouts = (start_s, silence_s)
        self.restarts = 0
        """Copies that were begun again."""
        self._actors: list[Any] = [self._begin(copy) for copy in range(len(places))]
        self._ask_all([()] * len(places))

    @property
    def pids(self) -> list[int]:
        """Processes of the copies."""
        return ray.get([actor.pid.remote() for actor in self._actors])

    def score(self, inputs: Sequence[ModelInput]) -> list[tuple[float, ...]]:
        """For each input the score of every token that is to be judged, in order."""
        prompts = {one.tokens[: one.prompt]: None for one in inputs}
        labels = {prompt: number for number, prompt in enumerate(prompts)}
        groups = [labels[one.tokens[: one.prompt]] for one in inputs]
        hands = balance_by_tokens(
            [len(one.tokens) for one in inputs], groups, ranks=len(self._actors)
        )
        answers = self._ask_all([[inputs[i] for i in hand] for hand in hands])
        found: dict[int, tuple[float, ...]] = {}
        for hand, scores in zip(hands, answers, strict=True):
            found |= dict(zip(hand, scores, strict=True))
        return [found[i] for i in range(len(inputs))]

    def close(self) -> None:
        """End every copy. Closing twice is allowed."""
        for actor in self._actors if ray.is_initialized() else ():
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _begin(self, copy: int) -> Any:
        remote: Any = ray.remote
        kind = remote(concurrency_groups={"life": 1})(RewardProcess)
        options = kind.options(max_restarts=0, **self._places[copy])
        return options.remote(self._make, folder=os.getcwd())

    def _ask_all(self, hands: Sequence[Sequence[ModelInput]]) -> list[Any]:
        """What each copy answers; those that are lost on the way are begun again and asked."""
        answers: list[Any] = [None] * len(hands)
        left, deaths = list(range(len(hands))), 0
        while left:
            lost = self._ask_some(left, hands, answers)
            left, deaths = list(lost), deaths + 1 if lost else 0
            for copy, why in lost.items():
                self._replace(copy, why, deaths)
        return answers

    def _ask_some(
        self, copies: Sequence[int], hands: Sequence[Sequence[ModelInput]], answers: list[Any]
    ) -> dict[int, str]:
        """Ask these copies; those that were lost, and why."""
        sent = time.time()
        calls = {self._actors[copy].score.remote(hands[copy]): copy for copy in copies}
        start_s, silence_s = self._timeouts
        asks = [self._actors[copy].alive.remote for copy in copies]
        pulse = HealthCheck(asks, start_s=start_s, silence_s=silence_s)
        lost: dict[int, str] = {}
        while calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=_LOOK_S)
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
                pulse.gone()
                silent = {copies[place]: s for place, s in pulse.silent().items()}
                for one, copy in [(o, c) for o, c in calls.items() if c in silent]:
                    lost[copy] = f"it gave no sign of life for {silent[copy]:.0f} s"
                    del calls[one]
        return lost

    def _reason(self, error: RayError, copy: int) -> str:
        """Why a copy was lost; what its code raised is raised here instead."""
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
        if deaths >= _DEATHS:
            self.close()
            said = f"copy {copy} of the reward model was lost {deaths} times in a row: {why}"
            fix = "look at its memory and at the node's logs; the run can be resumed"
            raise UserError(_FIELD, len(self._places), said, fix)
        self.restarts += 1
        self._actors[copy] = self._begin(copy)
