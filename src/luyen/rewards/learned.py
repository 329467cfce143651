"""A learned reward: all rollouts of a step read by a reward model in as few passes as they fit."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from time import perf_counter
from typing import Protocol, TypeAlias, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.clock import add_time
from luyen.rewards.model_input import ModelInput, Reader
from luyen.rewards.protocol import Group
from luyen.telemetry.waits import waiting_for

NAME = "reward_model"
"""What the learned reward is called among components."""
Steps: TypeAlias = Callable[[Sequence[float]], float]
"""One number from the scores of the judged tokens of an answer."""


class Scorer(Protocol):
    """A reward model, wherever it runs."""

    is_remote: bool
    """Whether other processes do the work, and this one waits for them."""

    def score(self, inputs: Sequence[ModelInput]) -> list[tuple[float, ...]]:
        """For each input the score of every token that is to be judged, in order."""
        ...

    def close(self) -> None:
        """Let the model go. Closing twice is allowed."""
        ...


def sigmoid(x: float) -> float:
    """1/(1 + e^-x), without overflow.

    Example:
        >>> sigmoid(0.0), sigmoid(-1000.0)
        (0.5, 0.0)
    """
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


STEP_RULES: dict[str, Steps] = {
    "min": lambda scores: min(map(sigmoid, scores)),
    "mean": lambda scores: math.fsum(map(sigmoid, scores)) / len(scores),
    "product": lambda scores: math.prod(map(sigmoid, scores)),
}
"""How the probabilities that steps are right become the reward of an answer."""


@final
class LearnedReward:
    """Judges by a reward model. It has weights of its own, which never change in a run.

    Passes run on a thread of their own, so that judges that wait for somebody else go on.
    """

    def __init__(
        self, scorer: Scorer, reader: Reader, *, longest: int, steps: str | None = None
    ) -> None:
        """`longest` is the most tokens it reads; a longer conversation is a fault, never cut.

        `steps` names how the steps of an answer make its reward; None: the one score is it.
        """
        self._scorer = scorer
        self._reader = reader
        self._longest = longest
        self._steps: Steps = STEP_RULES[steps] if steps is not None else lambda scores: scores[0]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")

    @property
    def names(self) -> tuple[str, ...]:
        """The one name of its scores."""
        return (NAME,)

    @property
    def way(self) -> str:
        """How it reads rollouts, in words."""
        return self._reader.way

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout of a single group."""
        return (await self.score_step([(prompt, rollouts)]))[0]

    async def score_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of every group, in order, from passes over all of them."""
        started = perf_counter()
        asked = [(prompt, rollout) for prompt, rollouts in groups for rollout in rollouts]
        read = [self._read(prompt, rollout) for prompt, rollout in asked]
        inputs = [one for one in read if isinstance(one, ModelInput)]
        found: list[tuple[float, ...]] = []
        if inputs:
            loop = asyncio.get_running_loop()
            with waiting_for(NAME) if self._scorer.is_remote else nullcontext():
                found = await loop.run_in_executor(self._thread, self._scorer.score, inputs)
        each_s = (perf_counter() - started) / max(1, len(asked))
        for _, rollout in asked:
            add_time(rollout, each_s)
        numbers = iter(found)
        scores = iter(
            [self._score(one if isinstance(one, str) else next(numbers), each_s) for one in read]
        )
        return [[next(scores) for _ in rollouts] for _, rollouts in groups]

    def close(self) -> None:
        """Let the model go. Closing twice is allowed."""
        self._thread.shutdown()
        self._scorer.close()

    def _read(self, prompt: Prompt, rollout: Rollout) -> ModelInput | str:
        """What the model is to read, or why it cannot."""
        try:
            found = self._reader.read(prompt, rollout)
        except UserError as error:
            return str(error)
        if len(found.tokens) > self._longest:
            count = len(found.tokens)
            return f"{count} tokens, and the reward model reads at most {self._longest}"
        return found

    def _score(self, found: tuple[float, ...] | str, seconds: float) -> Score:
        if isinstance(found, str):
            return Score(name=NAME, value=None, error=found, seconds=seconds)
        value = self._steps(found)
        if not math.isfinite(value):
            error = f"the reward model gave {value}"
            return Score(name=NAME, value=None, error=error, seconds=seconds)
        return Score(name=NAME, value=value, seconds=seconds)
