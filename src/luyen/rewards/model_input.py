"""Conversations as a reward model reads them: with its own tokenizer and its own template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, Rollout, Source
from luyen.data.formats.records import SteppedRow
from luyen.data.formats.render import render_steps
from luyen.data.render import Renderer

AS_SAMPLED = "the tokens of the rollout, since both models have one tokenizer and one template"
RENDERED = "messages rendered with the reward model's own tokenizer and chat template"
BY_STEP = "messages rendered with the reward model's own template, every line a step"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """What a reward model is to read, and where it is to judge.

    Example:
        >>> ModelInput(tokens=(5, 6, 7), prompt=1, judged=(2,)).judged
        (2,)
    """

    tokens: tuple[int, ...]
    """The whole conversation."""
    prompt: int
    """Tokens before the answer, which other answers may share."""
    judged: tuple[int, ...]
    """Places of the tokens that are judged, in order."""


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
        fix = "put a chat template beside its tokenizer"
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
    """An answer line by line, each line a step that is judged where it ends."""

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
