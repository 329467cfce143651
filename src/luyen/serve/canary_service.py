"""Two models behind one address: a share of the callers gets the candidate, until scores decide."""

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, final

from luyen.base.errors import UserError
from luyen.base.records import GroupId, Message, Rollout, Source, StopReason, make_prompt
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.pipeline.policy_loading import device_for
from luyen.rewards.build import BuiltReward, build_reward
from luyen.serve.canary import Arm, CanaryLimits, CanaryState, arm_of, caller_key
from luyen.serve.canary_log import CanaryLog
from luyen.serve.dispatch import ServeLimits
from luyen.serve.failures import ApiFailure, wrong
from luyen.serve.fields import number, one_of, read_fields, text
from luyen.serve.jobs import Job
from luyen.serve.model import ServedModel
from luyen.serve.opening import Opening, open_service
from luyen.serve.service import Body, Endpoints, ReplyPlan, Service
from luyen.train.builders.reward import reward_model_services
from luyen.train.builders.setup import import_plugins

_REMEMBERED = 100_000
"""Answers that can still be voted on."""
_OUTCOMES = {"promote": "promoted", "roll_back": "rolled_back"}


class AnswerScorer(Protocol):
    """Scores the answers to a request."""

    async def __call__(self, body: Body, reply: Body) -> float | None:
        """The score from 0 to 1; None: they cannot be scored."""
        ...

    def close(self) -> None:
        """Release what scoring needs."""
        ...


@final
class CanaryService:
    """The endpoints of a stable model and a candidate; lives on the event loop."""

    def __init__(
        self,
        stable: Service,
        candidate: Service,
        log: CanaryLog,
        *,
        scorer: AnswerScorer | None = None,
    ) -> None:
        """Without a `scorer` answers are scored by votes of clients."""
        self.limits = stable.limits
        self.metrics = stable.metrics
        self._arms: dict[Arm, Service] = {"stable": stable, "candidate": candidate}
        self._log = log
        self._scorer = scorer
        self._state = log.resume()
        self._answers: OrderedDict[str, Arm] = OrderedDict()
        self._counts: dict[Arm, int] = {"stable": 0, "candidate": 0}
        self._unscored = 0
        self._pending: set[asyncio.Task[None]] = set()
        self._watch()

    @property
    def model(self) -> ServedModel:
        """The model of most callers."""
        return self._arms["candidate" if self._state.share == 1.0 else "stable"].model

    @property
    def state(self) -> CanaryState:
        """What is known of the two models."""
        return self._state

    def endpoints(self) -> Endpoints:
        """Those of the stable model, votes, and the state of the comparison."""
        own = self._arms["stable"].endpoints()
        return Endpoints(
            jobs={
                "/v1/completions": partial(self._generate, Service.completion_job),
                "/v1/chat/completions": partial(self._generate, Service.chat_job),
            },
            posts={
                **own.posts,
                "/v1/feedback": self.vote,
                "/admin/weights": self._keep_weights,
                "/admin/canary": self.overrule,
            },
            gets={**own.gets, "/health": self.health, "/v1/canary": self.report},
        )

    async def one_model(self, name: str) -> Body:
        """The card of the model."""
        return await self._arms["stable"].one_model(name)

    async def close(self) -> None:
        """End both engines; scores that are being computed are lost."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*(service.close() for service in self._arms.values()))
        if self._scorer is not None:
            await asyncio.to_thread(self._scorer.close)

    async def health(self) -> Body:
        """Whether a model can answer; a candidate whose engine ended is rolled back."""
        if not self._arms["candidate"].dispatcher.is_healthy:
            self._decide("rolled_back", "its engine has ended")
        return await self._arms["stable" if self._state.share < 1.0 else "candidate"].health()

    async def vote(self, body: Body) -> Body:
        """Count the score that a client gives to an answer, once."""
        found = read_fields(body, {"id": text, "score": number(0.0, 1.0)})
        for name in ("id", "score"):
            if name not in found:
                raise wrong(name, None, "a vote has an id and a score", f"send {name}")
        if self._scorer is not None:
            message = "score: answers are scored by a reward here, and votes are not counted"
            raise ApiFailure(409, message, param="score", code="scored_by_reward")
        arm = self._answers.pop(found["id"], None)
        if arm is None:
            message = (
                "id: no answer of this id waits for a vote: it is unknown, old, or was voted on"
            )
            raise ApiFailure(404, message, param="id", code="unknown_answer")
        self._observe(found["id"], arm, found["score"], "vote")
        return {"id": found["id"], "score": found["score"], "counted": True}

    async def overrule(self, body: Body) -> Body:
        """Decide by hand."""
        found = read_fields(body, {"action": one_of(*_OUTCOMES)})
        if "action" not in found:
            raise wrong("action", None, "it is the decision", f"send one of {', '.join(_OUTCOMES)}")
        if self._state.decision is not None:
            message = f"action: the candidate was {self._state.decision.outcome} before"
            raise ApiFailure(409, message, param="action", code="decided")
        self._decide(_OUTCOMES[found["action"]], "an administrator decided so")
        return await self.report()

    async def report(self) -> Body:
        """The comparison so far."""
        state = self._state
        arms = {
            name: {
                "system_fingerprint": self._arms[name].model.digest,
                "requests": self._counts[name],
                "scores": scores.count,
                "mean_score": None if math.isnan(scores.mean) else scores.mean,
            }
            for name, scores in state.scores.items()
        }
        decision = state.decision
        return {
            "share": state.share,
            "models": arms,
            "pairs": state.pairs,
            "log_evidence": {
                "better": state.better.log_evidence,
                "worse": state.worse.log_evidence,
                "needed": -math.log(state.limits.error_rate),
            },
            "decision": None
            if decision is None
            else {"outcome": decision.outcome, "why": decision.why},
        }

    async def _keep_weights(self, body: Body) -> Body:
        del body
        message = "path: two models are compared, and their weights stay. Fix: restart the server"
        raise ApiFailure(409, message, param="path", code="canary")

    async def _generate(
        self, make_job: Callable[[Service, Body], Awaitable[Job]], body: Body
    ) -> ReplyPlan:
        arm = arm_of(caller_key(body), self._state.share)
        service = self._arms[arm]
        job = await make_job(service, body)
        self._counts[arm] += 1
        if self._scorer is None:
            self._remember(job.id, arm)
            return service.generation(job)
        made = service.generation(job)

        async def scored() -> Body:
            reply = await made.reply()
            self._score_later(arm, body, reply)
            return reply

        async def scored_stream() -> AsyncGenerator[bytes]:
            pieces: list[bytes] = []
            async with aclosing(made.stream()) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    yield piece
            self._score_later(arm, body, whole_reply(pieces))

        return ReplyPlan(is_streaming=made.is_streaming, reply=scored, stream=scored_stream)

    def _remember(self, id: str, arm: Arm) -> None:
        self._answers[id] = arm
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)

    def _score_later(self, arm: Arm, body: Body, reply: Body) -> None:
        """Score a reply while the client already reads it."""
        scorer = self._scorer
        assert scorer is not None, "there is a scorer"

        async def score() -> None:
            found = await scorer(body, reply)
            if found is None or not 0.0 <= found <= 1.0:
                self._unscored += 1
            else:
                self._observe(reply["id"], arm, found, "reward")

        task = asyncio.ensure_future(score())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def _observe(self, id: str, arm: Arm, score: float, source: str) -> None:
        self._log.score(id, arm, score, source)
        self._replace(self._state.observe(arm, score))

    def _decide(self, outcome: Any, why: str) -> None:
        self._replace(self._state.decide(outcome, why))

    def _replace(self, state: CanaryState) -> None:
        is_decided = state.decision is not None and self._state.decision is None
        self._state = state
        if is_decided:
            self._log.decision(state)

    def _watch(self) -> None:
        """Gauges of the comparison."""
        outcomes = {None: 0.0, "promoted": 1.0, "rolled_back": -1.0}
        watch = self.metrics.watch
        watch("luyen_canary_share", "Share of traffic of the candidate.", lambda: self._state.share)
        watch("luyen_canary_pairs", "Scores that were compared.", lambda: self._state.pairs)
        watch("luyen_canary_unscored", "Answers without a usable score.", lambda: self._unscored)
        watch(
            "luyen_canary_decision",
            "1: promoted, -1: rolled back, 0: open.",
            lambda: outcomes[self._state.decision and self._state.decision.outcome],
        )
        evidence = "Natural logarithm of the evidence that the candidate is {}."
        for name in ("better", "worse"):
            read = partial(lambda n: getattr(self._state, n).log_evidence, name)
            watch(f"luyen_canary_log_evidence_{name}", evidence.format(name), read)
        for arm in self._arms:
            watch(
                f"luyen_canary_{arm}_requests",
                f"Requests that the {arm} model answered.",
                partial(lambda a: self._counts[a], arm),
            )
            watch(
                f"luyen_canary_{arm}_mean_score",
                f"Mean score of the {arm} model.",
                partial(lambda a: self._state.scores[a].mean, arm),
            )


def whole_reply(pieces: Iterable[bytes]) -> Body:
    """The id and the texts of a reply that was sent as server-sent events.

    Example:
        >>> part = b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "4"}}]}\\n\\n'
        >>> whole_reply([part, part, b"data: [DONE]\\n\\n"])
        {'id': 'c', 'choices': [{'text': '44'}]}
    """
    id, texts = "", dict[int, str]()
    for line in b"".join(pieces).decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        id = event.get("id", id)
        for choice in event.get("choices", ()):
            part = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    return {"id": id, "choices": [{"text": texts[index]} for index in sorted(texts)]}


# Answers scored by the reward of a run: what training rewards decides in production.
#
# A request says what its answer is compared with in `metadata`, whose values are text:
# `data_source` and `ground_truth` as in a dataset row, and what else a reward reads.


@final
class RewardScorer:
    """Scores replies with a reward, mapped from its range to [0, 1]."""

    def __init__(
        self, reward: BuiltReward, tokenizer: Tokenizer, *, lowest: float, highest: float
    ) -> None:
        """`lowest` and `highest` are the bounds of the reward."""
        self._reward = reward
        self._tokenizer = tokenizer
        self._lowest = lowest
        self._width = highest - lowest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def __call__(self, body: Body, reply: Body) -> float | None:
        """The mean score of the answers; None where one could not be scored."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.score, body, reply)

    def score(self, body: Body, reply: Body) -> float | None:
        """The same, now."""
        given = body.get("metadata")
        metadata = cast(Mapping[str, Any], given) if isinstance(given, dict) else {}
        extra = {k: v for k, v in metadata.items() if k not in ("data_source", "ground_truth")}
        prompt = make_prompt(
            _messages(body),
            data_source=str(metadata.get("data_source", "")),
            ground_truth=metadata.get("ground_truth"),
            extra_info=extra,
        )
        texts = [_text(choice) for choice in reply["choices"]]
        rollouts = [self._rollout(prompt.uid, i, text) for i, text in enumerate(texts)]
        try:
            (scored,) = self._reward.score([(prompt, rollouts)])
        except UserError:
            return None
        values = [score.value for score in scored.scores]
        if None in values:
            return None
        mean = sum(cast(list[float], values)) / len(values)
        return (mean - self._lowest) / self._width

    def close(self) -> None:
        """End the processes of the reward."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reward.close()

    def _rollout(self, uid: str, sample: int, text: str) -> Rollout:
        tokens = tuple(self._tokenizer.encode(text))
        count = len(tokens)
        return Rollout(
            group=GroupId(step=0, draw=0, uid=uid),
            sample=sample,
            tokens=tokens,
            sources=(Source.SAMPLED,) * count,
            turns=(0,) * count,
            logps=(None,) * count,
            versions=(None,) * count,
            stop=StopReason.ANSWERED,
            text=text,
        )


def open_scorer(
    config: RunConfig, tokenizer: Tokenizer, *, bounds: tuple[float, float]
) -> RewardScorer:
    """A scorer with the reward of a configuration."""
    lowest, highest = bounds
    if not lowest < highest:
        why = "scores lie between two different bounds, the lower one first"
        raise UserError("--reward-range", f"{lowest:g} {highest:g}", why, "give LOW HIGH")
    import_plugins(config.trainer.plugins)
    renderer = Renderer(tokenizer, template_kwargs=config.data.apply_chat_template_kwargs)
    reward = build_reward(
        config.reward,
        max_response_length=config.data.max_response_length,
        services=reward_model_services(config, renderer, None, device_for(config)),
        require=config.sandbox.require,
    )
    return RewardScorer(reward, tokenizer, lowest=lowest, highest=highest)


def _messages(body: Body) -> Sequence[Message]:
    if "messages" in body:
        return cast(list[Message], body["messages"])
    return [{"role": "user", "content": str(body.get("prompt", ""))}]


def _text(choice: Mapping[str, Any]) -> str:
    if "message" in choice:
        return str(choice["message"].get("content") or "")
    return str(choice.get("text") or "")


# How two models are opened.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """The second model of a server, and how the two are compared.

    Example:
        >>> limits = CanaryLimits(share=0.1)
        >>> CanaryOptions(path="b", limits=limits, log=Path("canary.jsonl")).reward_range is None
        True
    """

    path: str
    """The candidate."""
    limits: CanaryLimits
    """When it is promoted, and when it is rolled back."""
    log: Path
    """Where scores and decisions are written."""
    reward_range: tuple[float, float] | None = None
    """Bounds of the candidate's own reward, which scores answers; None: clients vote."""


def open_canary(
    path: str, opening: Opening, limits: ServeLimits, canary: CanaryOptions
) -> CanaryService:
    """Load two policies and compare them."""
    stable = open_service(path, opening, limits)
    if not isinstance(stable, Service):
        why = "answers are compared, and a reward model gives none"
        raise UserError("--canary", canary.path, why, "serve a policy")
    named = replace(opening, name=stable.model.name)
    candidate = open_service(canary.path, named, limits)
    if not isinstance(candidate, Service):
        why = "it is a reward model, and answers are compared"
        raise UserError("--canary", canary.path, why, "name a policy")
    log = CanaryLog(
        canary.log,
        stable=stable.model.digest,
        candidate=candidate.model.digest,
        limits=canary.limits,
    )
    scorer = None
    if canary.reward_range is not None:
        loaded = candidate.model.loaded
        scorer = open_scorer(loaded.config, candidate.model.tokenizer, bounds=canary.reward_range)
    return CanaryService(stable, candidate, log, scorer=scorer)
