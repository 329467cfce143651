"""The rollout engine of a run as a judge: questions that come together are drawn together."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary
from luyen.base.records import GroupId, Message, Prompt, Rollout, StopReason, make_prompt
from luyen.data.render import Renderer
from luyen.rewards.judge_faults import CUT_OFF, ENGINE, JudgeFault, shown
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Draw, Group

PURPOSE = "judge"
"""What its rollouts are drawn for, so that their random numbers are nobody else's."""
_SETTLING_ROUNDS = 16
"""Turns of the event loop in which others may join."""
DrawAll: TypeAlias = Callable[[Sequence[Draw], Sampling], list[Group]]
_Asked: TypeAlias = tuple[Prompt, Sampling, "asyncio.Future[str]"]


@final
class EngineAsk:
    """Asks the engine that draws rollouts; it is a `luyen.rewards.protocol.Ask`.

    The same question gets the same answer from the same weights, at any temperature.
    """

    def __init__(self, renderer: Renderer, *, longest: int) -> None:
        """`longest`: tokens of a prompt and its answer that the engine can hold."""
        self._renderer = renderer
        self._longest = longest
        self._draw: DrawAll | None = None
        self._waiting: list[_Asked] = []
        self._flushing: asyncio.Task[None] | None = None

    def connect(self, draw: DrawAll) -> None:
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
        alike: dict[Sampling, list[_Asked]] = {}
        for one in asked:
            alike.setdefault(one[1], []).append(one)
        for sampling, some in alike.items():
            self._answer(sampling, some)

    def _answer(self, sampling: Sampling, asked: Sequence[_Asked]) -> None:
        prompts = {prompt.uid: prompt for prompt, _, _ in asked}
        draws = [
            Draw(group=GroupId(step=0, draw=0, uid=uid), prompt=prompt, samples=1)
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
                why = f"max_tokens ended the reply: {shown(replies[prompt.uid].text)}"
                reply.set_exception(JudgeFault(CUT_OFF, why))
            else:
                reply.set_result(replies[prompt.uid].text)
