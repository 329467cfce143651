"""Answers of a server scored by the reward of a run: what training rewards decides in production.

A request says what its answer is compared with in `metadata`, whose values are text: `data_source`
and `ground_truth` as in a dataset row, and whatever else a reward reads as extra information.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.records import GroupId, Message, Rollout, Source, StopReason, make_prompt
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.pipeline.policy_loading import device_for
from luyen.rewards.build import BuiltReward, build_reward
from luyen.serve.service import Body
from luyen.train.builders.reward import reward_model_services
from luyen.train.builders.setup import import_plugins


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
