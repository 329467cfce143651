"""One question, one answer: prompts become requests, completions become rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from luyen.base.records import GroupId, Prompt, Rollout, Source, StopReason
from luyen.base.seeds import derive_key
from luyen.data.render import Renderer
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling, generate

_STOPS = {
    "stop": StopReason.ANSWERED,
    "length": StopReason.TOKEN_BUDGET,
    "aborted": StopReason.ABORTED,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A prompt drawn at some place of the run, and how many answers are wanted.

    Example:
        >>> Draw(group=GroupId(step=0, draw=1, uid="a"), prompt=None, samples=4).samples
        4
    """

    group: GroupId
    """Step, index of the draw, and the prompt's uid."""
    prompt: Prompt
    """What is asked."""
    samples: int
    """Answers wanted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one draw.

    Example:
        >>> Group(prompt=None, rollouts=()).rollouts
        ()
    """

    prompt: Prompt
    """What was asked."""
    rollouts: tuple[Rollout, ...]
    """Its answers, by sample index."""


def answer(
    engine: RolloutEngine,
    renderer: Renderer,
    draws: Sequence[Draw],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
) -> list[Group]:
    """Rollouts of every draw, in the order of the draws, whatever finished first."""
    prompts = {
        str(draw.group): tuple(renderer.prompt_tokens(draw.prompt.messages, draw.prompt.tools))
        for draw in draws
    }
    requests = [
        Request(
            id=str(draw.group),
            tokens=prompts[str(draw.group)],
            keys=tuple(sampling_key(seed, purpose, draw.group, i) for i in range(draw.samples)),
            sampling=sampling,
        )
        for draw in draws
    ]
    found = generate(engine, requests)
    return [_group(draw, prompts, found, renderer, version) for draw in draws]


def sampling_key(seed: int, purpose: str, group: GroupId, sample: int, turn: int = 0) -> int:
    """The address of one turn's random numbers."""
    return derive_key(seed, purpose, group.step, group.draw, group.uid, sample, turn)


def _group(
    draw: Draw,
    prompts: Mapping[str, tuple[int, ...]],
    found: Mapping[tuple[str, int], Completion],
    renderer: Renderer,
    version: int,
) -> Group:
    name = str(draw.group)
    rollouts = tuple(
        _rollout(draw.group, prompts[name], found[name, i], renderer, version)
        for i in range(draw.samples)
    )
    return Group(prompt=draw.prompt, rollouts=rollouts)


def _rollout(
    group: GroupId,
    prompt: tuple[int, ...],
    completion: Completion,
    renderer: Renderer,
    version: int,
) -> Rollout:
    before, drawn = len(prompt), len(completion.tokens)
    return Rollout(
        group=group,
        sample=completion.sample,
        tokens=prompt + completion.tokens,
        sources=(Source.PROMPT,) * before + (Source.SAMPLED,) * drawn,
        turns=(0,) * (before + drawn),
        logps=(None,) * before + completion.logps,
        versions=(None,) * before + (version,) * drawn,
        stop=_STOPS[completion.reason],
        text=renderer.text_of(completion.tokens),
    )
