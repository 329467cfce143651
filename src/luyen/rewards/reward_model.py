"""A reward model as a reward: how it reads rollouts, and all of a step scored together."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeAlias, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, Rollout, Score, Source
from luyen.data.formats.records import SteppedRow
from luyen.data.formats.render import render_steps
from luyen.data.render import Renderer
from luyen.rewards.calls import add_time
from luyen.rewards.protocol import Group
from luyen.telemetry.spans import waiting_for

# Rendering for a reward model: with its own tokenizer and chat template.

AS_SAMPLED = "the tokens of the rollout, since both models have one tokenizer and one template"
RENDERED = "messages rendered with the reward model's own tokenizer and chat template"
BY_STEP = "messages rendered with the reward model's own template, every line a step"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """What a reward model is to read, and where it is to score.

    Example:
        >>> ModelInput(tokens=(5, 6, 7), prompt=1, judged=(2,)).judged
        (2,)
    """

    tokens: tuple[int, ...]
    """The whole conversation."""
    prompt: int
    """Tokens before the answer, which other answers may share."""
    judged: tuple[int, ...]
    """Places of the tokens that are scored, in order."""


class Reader(Protocol):
    """Turns a rollout into what the model reads."""

    @property
    def way(self) -> str:
        """How, in words."""
        ...

    def read(self, prompt: Prompt, rollout: Rollout) -> ModelInput:
        """What the model reads; a UserError where its template refuses the conversation."""
        ...


def reader_for(own: Renderer, policy: Renderer, *, is_stepwise: bool) -> Reader:
    """How a model with the renderer `own` reads what a policy with another one said.

    Tokens are taken as they are only where both tokenizers and both templates are the same; a
    model that reads other text than it was trained on gives numbers all the same, and wrong ones.
    """
    if is_stepwise:
        return StepReader(own)
    (ids, template), (policy_ids, policy_template) = (
        renderer.tokenizer.fingerprint() for renderer in (own, policy)
    )
    if ids == policy_ids and template in (policy_template, None):
        return TokenReader(policy)
    if template is None:
        why = "it has another tokenizer than the policy, and no chat template"
        fix = "add a chat template to its tokenizer's files"
        raise UserError("reward.reward_model.model_path", own.tokenizer.path, why, fix)
    return MessageReader(own)


@final
class TokenReader:
    """The tokens of the rollout, closed as the template closes a turn."""

    way = AS_SAMPLED

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer = renderer.tokenizer
        end = self._tokenizer.turn_end
        self._end = None if end is None else end.token
        self._closing = tuple(self._tokenizer.encode(end.text + end.trailing)) if end else ()
        self._trailing = tuple(self._tokenizer.encode(end.trailing)) if end else ()

    def read(self, prompt: Prompt, rollout: Rollout) -> ModelInput:
        """The tokens as sampled; an answer that was cut off is closed."""
        del prompt  # its tokens are among the rollout's
        tokens = rollout.tokens
        if rollout.sources[-1] == Source.SAMPLED and self._closing:
            tokens = self._closed(tokens)
        return ModelInput(tokens=tokens, prompt=_start(rollout.sources), judged=(len(tokens) - 1,))

    def _closed(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if tokens[-1] == self._end:
            return tokens + self._trailing
        # Another token that ends turns stands where the template has its own.
        said = tokens[:-1] if tokens[-1] in self._tokenizer.stop_ids else tokens
        return said + self._closing


@final
class MessageReader:
    """The messages as the model's own template writes them."""

    way = RENDERED

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def read(self, prompt: Prompt, rollout: Rollout) -> ModelInput:
        """The conversation as it stands in the end."""
        messages = [*prompt.messages, *_said(rollout)]
        last = self._renderer.conversation(messages, prompt.tools)[-1]
        return ModelInput(
            tokens=last.tokens, prompt=_start(last.sources), judged=(len(last.tokens) - 1,)
        )


@final
class StepReader:
    """An answer line by line, each line a step that is scored where it ends."""

    way = BY_STEP

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def read(self, prompt: Prompt, rollout: Rollout) -> ModelInput:
        """The last answer in steps; what was said before it belongs to the prompt."""
        *before, last = _said(rollout)
        lines = [line for line in str(last.get("content") or "").splitlines() if line.strip()]
        steps = tuple(lines) or ("",)
        row = SteppedRow(
            prompt=(*prompt.messages, *before),
            steps=steps,
            labels=(None,) * len(steps),
            tools=prompt.tools,
        )
        laid = render_steps(row, self._renderer)
        start = len(laid.prompt)
        return ModelInput(
            tokens=laid.prompt + laid.tokens,
            prompt=start,
            judged=tuple(start + end for end in laid.ends),
        )


def _said(rollout: Rollout) -> Sequence[Message]:
    return rollout.messages or ({"role": "assistant", "content": rollout.text},)


def _start(sources: Sequence[Source]) -> int:
    return sources.index(Source.SAMPLED) if Source.SAMPLED in sources else len(sources)


NAME = "reward_model"
"""What the learned reward is called among components."""
Steps: TypeAlias = Callable[[Sequence[float]], float]
"""One number from the scores of the scored tokens of an answer."""


class Scorer(Protocol):
    """A reward model, wherever it runs."""

    is_remote: bool
    """Whether other processes do the work, and this one waits for them."""

    def score(self, inputs: Sequence[ModelInput]) -> list[tuple[float, ...]]:
        """For each input the score of every token that is to be scored, in order."""
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
    """Scores by a reward model. It has weights of its own, which never change in a run.

    Forward passes run on a separate thread, so that judges that await a server are not blocked.
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
        pairs = [(prompt, rollout) for prompt, rollouts in groups for rollout in rollouts]
        read = [self._read(prompt, rollout) for prompt, rollout in pairs]
        inputs = [one for one in read if isinstance(one, ModelInput)]
        found: list[tuple[float, ...]] = []
        if inputs:
            loop = asyncio.get_running_loop()
            with waiting_for(NAME) if self._scorer.is_remote else nullcontext():
                found = await loop.run_in_executor(self._thread, self._scorer.score, inputs)
        each_s = (perf_counter() - started) / max(1, len(pairs))
        for _, rollout in pairs:
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
