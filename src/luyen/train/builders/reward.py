"""Model services for rewards: the reward model, and the rollout engine as an LLM judge."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError
from luyen.base.records import GroupId, Message, Prompt, Rollout, StopReason, make_prompt
from luyen.config.plan import reward_pool
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.rewards.llm_judge.faults import CUT_OFF, ENGINE, JudgeFault, quoted_end
from luyen.rewards.protocol import Services
from luyen.rewards.reward_model import Scorer
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.monitoring import RoleMonitor
from luyen.runtime.reward_model import load_scorer, open_learned_reward

if TYPE_CHECKING:
    from luyen.runtime.ray.reward_model import RayScorer


def reward_model_services(
    config: RunConfig,
    policy: Renderer,
    scorer: Scorer | None,
    device: str,
    *,
    say: Callable[[str], None] | None = None,
) -> Services:
    """The reward model as a service, if enabled.

    Without a `scorer`, the model is loaded in this process. Closing the rewards closes it. `say`
    is told which tokens the model reads.
    """
    reward_model = config.reward.reward_model
    if not reward_model.enable:
        return Services()
    start: Callable[[], Scorer] = partial(load_scorer, reward_model, device, is_alone=False)
    model = open_learned_reward(reward_model, policy, start if scorer is None else lambda: scorer)
    if say is not None:
        say(f"the reward model reads {model.way}")
    return Services(model=model, closing=model.close)


def ray_reward_model(
    config: RunConfig, device: str, places: Sequence[Mapping[str, Any]], watch: RoleMonitor
) -> "RayScorer | None":
    """Start copies of the reward model on a cluster; None where it is disabled."""
    reward_model = config.reward.reward_model
    if not reward_model.enable:
        return None
    # Imported here: the caller has checked that ray is installed.
    from luyen.runtime.ray.reward_model import RayScorer

    is_alone = reward_pool(config) is not None
    make = partial(load_scorer, reward_model, device, is_alone=is_alone)
    return RayScorer(make, places=places, watch=watch, timeouts=config.trainer.timeouts)


JUDGE_PURPOSE = "judge"
"""Purpose of its rollouts, which gives them their own random numbers."""
_JOIN_ROUNDS = 16
"""Event loop iterations to wait for further questions of the same batch."""
GenerateAll: TypeAlias = Callable[[Sequence[PromptRequest], Sampling], list[Group]]
_Question: TypeAlias = tuple[Prompt, Sampling, "asyncio.Future[str]"]


@final
class EngineJudge:
    """The rollout engine as LLM judge (`luyen.rewards.protocol.Ask`); batches questions.

    The same question gets the same reply from the same weights, at any temperature.
    """

    def __init__(self, renderer: Renderer, *, longest: int) -> None:
        """`longest`: maximum tokens of prompt and response in the engine."""
        self._renderer = renderer
        self._longest = longest
        self._generate: GenerateAll | None = None
        self._waiting: list[_Question] = []
        self._flushing: asyncio.Task[None] | None = None

    def connect(self, generate: GenerateAll) -> None:
        """Set the function that generates replies; the reward is built before the roles."""
        self._generate = generate

    async def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """The complete reply; a UserError when the question does not fit."""
        sampling = Sampling(
            max_new_tokens=settings["max_tokens"],
            temperature=settings["temperature"],
            stop_ids=self._renderer.tokenizer.stop_ids,
        )
        tokens = len(self._renderer.prompt_tokens(messages))
        if tokens + sampling.max_new_tokens > self._longest:
            why = f"the question takes {tokens} tokens, and the engine holds {self._longest}"
            fix = "lower judge.max_tokens, or raise data.max_prompt_length"
            raise UserError("judge.max_tokens", sampling.max_new_tokens, why, fix)
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((make_prompt(messages), sampling, reply))
        if len(self._waiting) == 1:
            self._flushing = asyncio.create_task(self._flush())
        return await reply

    async def _flush(self) -> None:
        for _ in range(_JOIN_ROUNDS):
            await asyncio.sleep(0)
        questions, self._waiting = self._waiting, []
        alike: dict[Sampling, list[_Question]] = {}
        for one in questions:
            alike.setdefault(one[1], []).append(one)
        for sampling, some in alike.items():
            self._answer(sampling, some)

    def _answer(self, sampling: Sampling, questions: Sequence[_Question]) -> None:
        prompts = {prompt.uid: prompt for prompt, _, _ in questions}
        requests = [
            PromptRequest(group=GroupId(step=0, draw=0, uid=uid), prompt=prompt, samples=1)
            for uid, prompt in prompts.items()
        ]
        faults: list[BaseException] = []
        replies: dict[str, Rollout] = {}
        with boundary(faults):
            assert self._generate is not None, "the judge was called before `connect`"
            groups = self._generate(requests, sampling)
            replies = {group.prompt.uid: group.rollouts[0] for group in groups}
        for prompt, _, reply in questions:
            if reply.done():  # cancelled
                continue
            if faults:
                reply.set_exception(JudgeFault(ENGINE, last_line(faults[0])))
            elif replies[prompt.uid].stop == StopReason.TOKEN_BUDGET:
                why = f"max_tokens ended the reply: {quoted_end(replies[prompt.uid].text)}"
                reply.set_exception(JudgeFault(CUT_OFF, why))
            else:
                reply.set_result(replies[prompt.uid].text)
