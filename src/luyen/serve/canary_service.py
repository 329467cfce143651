"""Two models behind one address: a share of the callers gets the candidate, until scores decide."""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError
from luyen.base.records import GroupId, Message, Rollout, Source, StopReason, make_prompt
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.pipeline.policy_loading import device_for
from luyen.rewards.build import BuiltReward, build_reward
from luyen.rewards.scoring import VALIDATION, ScoreJournal
from luyen.serve.canary_decision import Arm, CanaryLimits, CanaryState, Outcome, arm_of, caller_key
from luyen.serve.canary_log import CanaryLog
from luyen.serve.dispatch import ServeLimits
from luyen.serve.failures import ApiFailure, wrong
from luyen.serve.fields import number, one_of, read_fields, text
from luyen.serve.jobs import Job
from luyen.serve.model import ServedModel
from luyen.serve.opening import Opening, open_policy
from luyen.serve.scoring import is_reward_model
from luyen.serve.service import Body, Endpoints, ReplyPlan, Service
from luyen.serve.streams import whole_reply
from luyen.train.builders.reward import reward_model_services
from luyen.train.builders.setup import import_plugins, load_run_tokenizer

_LOG = logging.getLogger("luyen.serve")
_MOST_ANSWERS = 100_000
"""Answers that can still be voted on."""
_MOST_PENDING = 128
"""Answers that wait for their score; further ones stay unscored while a reward is slow."""
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
        """The stable model, or a candidate that was promoted."""
        return self._main.model

    @property
    def state(self) -> CanaryState:
        """What is known of the two models."""
        return self._state

    def endpoints(self) -> Endpoints:
        """Those of one model, votes, and the state of the comparison."""
        own = self._arms["stable"].endpoints()
        return Endpoints(
            jobs={
                "/v1/completions": partial(self._generate, Service.completion_job),
                "/v1/chat/completions": partial(self._generate, Service.chat_job),
            },
            posts={
                **own.posts,
                "/tokenize": lambda body: self._main.tokenize(body),
                "/detokenize": lambda body: self._main.detokenize(body),
                "/v1/feedback": self.vote,
                "/admin/weights": self._keep_weights,
                "/admin/canary": self.overrule,
            },
            gets={
                "/v1/models": lambda: self._main.models(),
                "/health": self.health,
                "/v1/canary": self.report,
            },
        )

    async def one_model(self, name: str) -> Body:
        """The card of the model."""
        return await self._main.one_model(name)

    async def close(self) -> None:
        """End both engines; scores that are being computed are lost."""
        for task in self._pending:
            task.cancel()
        try:
            await asyncio.gather(*(service.close() for service in self._arms.values()))
        finally:
            if self._scorer is not None:
                await asyncio.to_thread(self._scorer.close)

    async def health(self) -> Body:
        """Whether a model can answer; a candidate whose engine ended is rolled back."""
        self._check_candidate()
        return await self._main.health()

    async def vote(self, body: Body) -> Body:
        """Count the score that a client gives to an answer, once; none after a decision."""
        found = read_fields(body, {"id": text, "score": number(0.0, 1.0)})
        for name in ("id", "score"):
            if name not in found:
                raise wrong(name, None, "a vote has an id and a score", f"send {name}")
        if self._scorer is not None:
            message = "score: answers are scored by a reward here, and votes are not counted"
            raise ApiFailure(409, message, param="score", code="scored_by_reward")
        arm = self._answers.get(found["id"])
        if arm is None:
            message = (
                "id: no answer of this id waits for a vote: it is unknown, old, or was voted on"
            )
            raise ApiFailure(404, message, param="id", code="unknown_answer")
        is_open = self._state.decision is None
        with _guard_log():
            self._observe(found["id"], arm, found["score"], "vote")
        del self._answers[found["id"]]
        return {"id": found["id"], "score": found["score"], "counted": is_open}

    async def overrule(self, body: Body) -> Body:
        """Decide by hand."""
        found = read_fields(body, {"action": one_of(*_OUTCOMES)})
        if "action" not in found:
            raise wrong("action", None, "it is the decision", f"send one of {', '.join(_OUTCOMES)}")
        if self._state.decision is not None:
            message = f"action: the candidate was {self._state.decision.outcome} before"
            raise ApiFailure(409, message, param="action", code="decided")
        outcome = _OUTCOMES[found["action"]]
        state = self._state.decide(cast(Outcome, outcome), "an administrator decided so")
        with _guard_log():
            self._log.decision(state)
        self._state = state
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
        self._check_candidate()
        arm = arm_of(caller_key(body), self._state.share)
        service = self._arms[arm]
        job = await make_job(service, body)
        self._counts[arm] += 1
        plan = service.generation(job)
        if self._state.decision is not None:
            return plan
        if self._scorer is not None:
            return self._with_score(plan, arm, body, self._scorer)
        self._answers[job.id] = arm
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)
        return plan

    def _with_score(self, plan: ReplyPlan, arm: Arm, body: Body, scorer: AnswerScorer) -> ReplyPlan:
        """A plan whose reply is scored while the client already reads it."""

        def score(reply: Body | None) -> None:
            if reply is None or len(self._pending) >= _MOST_PENDING:
                self._unscored += 1
            elif self._state.decision is None:
                task = asyncio.ensure_future(self._score(arm, body, reply, scorer))
                self._pending.add(task)
                task.add_done_callback(self._pending.discard)

        async def whole() -> Body:
            reply = await plan.reply()
            score(reply)
            return reply

        async def stream() -> AsyncGenerator[bytes]:
            pieces: list[bytes] = []
            async with aclosing(plan.stream()) as events:
                async for piece in events:
                    pieces.append(piece)
                    yield piece
            score(whole_reply(pieces))

        return ReplyPlan(is_streaming=plan.is_streaming, reply=whole, stream=stream)

    async def _score(self, arm: Arm, body: Body, reply: Body, scorer: AnswerScorer) -> None:
        """Count the score of a reply; whatever prevents it makes the reply an unscored one."""
        faults: list[BaseException] = []
        with boundary(faults):
            found = await scorer(body, reply)
            if found is not None and 0.0 <= found <= 1.0:
                self._observe(reply["id"], arm, found, "reward")
                return
        self._unscored += 1
        if faults:
            _LOG.warning("an answer was not scored: %s", last_line(faults[0]))

    @property
    def _main(self) -> Service:
        """The service of the stable model, or of a candidate that was promoted."""
        return self._arms["candidate" if self._state.share == 1.0 else "stable"]

    def _check_candidate(self) -> None:
        """Roll a candidate back whose engine ended."""
        if not self._arms["candidate"].dispatcher.is_healthy:
            self._advance(self._state.decide("rolled_back", "its engine has ended"))

    def _observe(self, id: str, arm: Arm, score: float, source: str) -> None:
        """Count a score, in the file first; a UserError where it cannot be written."""
        if self._state.decision is None:
            self._log.score(id, arm, score, source)
            self._advance(self._state.observe(arm, score))

    def _advance(self, state: CanaryState) -> None:
        is_new = state.decision is not None and self._state.decision is None
        self._state = state
        if is_new:
            try:
                self._log.decision(state)
            except UserError as error:
                # It holds all the same; a restart makes it again of the scores.
                _LOG.error("a decision is not in the file: %s", error)

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
                f"Requests that went to the {arm} model.",
                partial(lambda a: self._counts[a], arm),
            )
            watch(
                f"luyen_canary_{arm}_mean_score",
                f"Mean score of the {arm} model.",
                partial(lambda a: self._state.scores[a].mean, arm),
            )


@contextmanager
def _guard_log() -> Iterator[None]:
    """A file that cannot be written is an error of the server, which shows no client its path."""
    try:
        yield
    except UserError as error:
        _LOG.error("the comparison cannot be written: %s", error)
        message = "it could not be written, and does not count; the server's log says why"
        raise ApiFailure(500, message, type="server_error", code="canary_log") from None


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
        """The mean score of the answers; None where one cannot be scored.

        These cannot: calls of tools, prompts that are not one text, and answers after an `echo`.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.score, body, reply)

    def score(self, body: Body, reply: Body) -> float | None:
        """The same, now."""
        metadata, choices = body.get("metadata") or {}, reply["choices"]
        is_text = isinstance(body.get("prompt", ""), str) and not body.get("echo")
        has_calls = any(choice["finish_reason"] == "tool_calls" for choice in choices)
        if not is_text or has_calls or not isinstance(metadata, dict):
            return None
        metadata = cast(Mapping[str, Any], metadata)
        extra = {k: v for k, v in metadata.items() if k not in ("data_source", "ground_truth")}
        prompt = make_prompt(
            _messages(body),
            data_source=str(metadata.get("data_source", "")),
            ground_truth=metadata.get("ground_truth"),
            extra_info=extra,
        )
        rollouts = [self._rollout(prompt.uid, i, choice) for i, choice in enumerate(choices)]
        # As in a validation: what is normalised in training cannot be compared over time.
        (scored,) = self._reward.score([(prompt, rollouts)], ScoreJournal(purpose=VALIDATION))
        values = [score.value for score in scored.scores]
        if None in values:
            return None
        mean = sum(cast(list[float], values)) / len(values)
        return (mean - self._lowest) / self._width

    def close(self) -> None:
        """End the processes of the reward."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reward.close()

    def _rollout(self, uid: str, sample: int, choice: Mapping[str, Any]) -> Rollout:
        text, is_cut = _text(choice), choice["finish_reason"] == "length"
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
            stop=StopReason.TOKEN_BUDGET if is_cut else StopReason.ANSWERED,
            text=text,
        )


def open_scorer(config: RunConfig, *, bounds: tuple[float, float]) -> RewardScorer:
    """A scorer with the reward of a configuration."""
    lowest, highest = bounds
    import_plugins(config.trainer.plugins)
    # Its own: that of the model is used on another thread.
    tokenizer = load_run_tokenizer(config)
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
    return [{"role": "user", "content": body["prompt"]}]


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
    _refuse_options(canary)
    for field, one in (("CHECKPOINT", path), ("--canary", canary.path)):
        if is_reward_model(one, is_trusted=opening.is_trusted):
            why = "it is a reward model, and answers are compared"
            raise UserError(field, one, why, "name a policy")
    stable = open_policy(path, opening, limits)
    named = replace(opening, name=stable.model.name)
    candidate = open_policy(canary.path, named, limits, metrics=stable.metrics)
    _refuse_mismatch(stable.model, candidate.model, canary.path)
    bounds = canary.reward_range
    log = CanaryLog(
        canary.log,
        stable=stable.model.digest,
        candidate=candidate.model.digest,
        limits=canary.limits,
        source="votes" if bounds is None else f"reward from {bounds[0]!r} to {bounds[1]!r}",
    )
    loaded = candidate.model.loaded
    scorer = None if bounds is None else open_scorer(loaded.config, bounds=bounds)
    return CanaryService(stable, candidate, log, scorer=scorer)


def _refuse_options(canary: CanaryOptions) -> None:
    if not 0.0 < canary.limits.share < 1.0:
        why = "one of the two models would never answer, and nothing would be compared"
        raise UserError("--share", canary.limits.share, why, "give a share between 0 and 1")
    lowest, highest = canary.reward_range or (0.0, 1.0)
    if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
        why = "scores lie between two different finite bounds, the lower one first"
        raise UserError("--reward-range", f"{lowest:g} {highest:g}", why, "give LOW HIGH")


def _refuse_mismatch(stable: ServedModel, candidate: ServedModel, path: str) -> None:
    """A UserError where a request to one model would mean something else to the other."""
    difference = stable.tokenizer.difference(candidate.tokenizer)
    if difference is not None:
        why = f"its tokenizer is not that of the stable model: {difference}"
        raise UserError("--canary", path, why, "compare models of one tokenizer")
    if candidate.max_model_len < stable.max_model_len:
        longest = candidate.max_model_len
        why = f"it reads {longest} tokens, and the stable model {stable.max_model_len}"
        raise UserError("--canary", path, why, f"give --max-model-len {longest}")
