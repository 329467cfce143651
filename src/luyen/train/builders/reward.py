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
    """What rewards are brought: the reward model, where it is on.

    Without a `scorer`, the model is loaded here. Closing the rewards closes it. `say` hears which
    tokens it reads.
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
    """Copies of the reward model in these places of a cluster; None where it is off."""
    reward_model = config.reward.reward_model
    if not reward_model.enable:
        return None
    # Only here is it known that ray is installed.
    from luyen.runtime.ray.reward_model import RayScorer

    is_alone = reward_pool(config) is not None
    make = partial(load_scorer, reward_model, device, is_alone=is_alone)
    return RayScorer(make, places=places, watch=watch)


# The rollout engine of a run as a judge: questions that come together are drawn together.

JUDGE_PURPOSE = "judge"
"""What its rollouts are drawn for, so that their random numbers are nobody else's."""
_SETTLING_ROUNDS = 16
"""Turns of the event loop in which others may join."""
GenerateAll: TypeAlias = Callable[[Sequence[PromptRequest], Sampling], list[Group]]
_Question: TypeAlias = tuple[Prompt, Sampling, "asyncio.Future[str]"]


@final
class EngineJudge:
    """Asks the engine that draws rollouts; it is a `luyen.rewards.protocol.Ask`.

    The same question gets the same answer from the same weights, at any temperature.
    """

    def __init__(self, renderer: Renderer, *, longest: int) -> None:
        """`longest`: tokens of a prompt and its answer that the engine can hold."""
        self._renderer = renderer
        self._longest = longest
        self._draw: GenerateAll | None = None
        self._waiting: list[_Question] = []
        self._flushing: asyncio.Task[None] | None = None

    def connect(self, draw: GenerateAll) -> None:
        """From now on questions are drawn by this; a reward is built before the engine is."""
        self._draw = draw

    async def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """The reply, said to its end; a UserError when the question does not fit."""
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
        for _ in range(_SETTLING_ROUNDS):
            await asyncio.sleep(0)
        asked, self._waiting = self._waiting, []
        alike: dict[Sampling, list[_Question]] = {}
        for one in asked:
            alike.setdefault(one[1], []).append(one)
        for sampling, some in alike.items():
            self._answer(sampling, some)

    def _answer(self, sampling: Sampling, asked: Sequence[_Question]) -> None:
        prompts = {prompt.uid: prompt for prompt, _, _ in asked}
        draws = [
            PromptRequest(group=GroupId(step=0, draw=0, uid=uid), prompt=prompt, samples=1)
            for uid, prompt in prompts.items()
        ]
        faults: list[BaseException] = []
        replies: dict[str, Rollout] = {}
        with boundary(faults):
            assert self._draw is not None, "a judge was asked before there was an engine"
            groups = self._draw(draws, sampling)
            replies = {group.prompt.uid: group.rollouts[0] for group in groups}
        for prompt, _, reply in asked:
            if reply.done():  # nobody waits any more
                continue
            if faults:
                reply.set_exception(JudgeFault(ENGINE, last_line(faults[0])))
            elif replies[prompt.uid].stop == StopReason.TOKEN_BUDGET:
                why = f"max_tokens ended the reply: {quoted_end(replies[prompt.uid].text)}"
                reply.set_exception(JudgeFault(CUT_OFF, why))
            else:
                reply.set_result(replies[prompt.uid].text)
