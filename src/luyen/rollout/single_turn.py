"""Single-turn generation: prompts become engine requests, completions become rollouts."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from luyen.base.records import GroupId, Prompt, Rollout, Source, StopReason
from luyen.base.seeds import derive_key
from luyen.data.render import Renderer
from luyen.rollout.client import EngineClient
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling, finish
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.progress import PROGRESS

# Pieces of work at the same time, of which the first error ends all.

T = TypeVar("T")


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What came of each, in order; the first error stops the rest and is raised once they went.

    It is raised as it is and not in a group: callers know errors by their kind.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_STOPS = {
    "stop": StopReason.ANSWERED,
    "length": StopReason.TOKEN_BUDGET,
    "aborted": StopReason.ABORTED,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A prompt drawn at some place of the run, and how many answers are wanted.

    Example:
        >>> PromptRequest(group=GroupId(step=0, draw=1, uid="a"), prompt=None, samples=4).samples
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


def submit_requests(
    engine: RolloutEngine,
    renderer: Renderer,
    draws: Sequence[PromptRequest],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
    journal: WorkJournal | None = None,
) -> Callable[[], list[Group]]:
    """Ask for rollouts of every draw; the result waits for them, and gives them in that order.

    Those that the journal has are not drawn again; others are written down as they finish.
    """
    found = _journaled(draws, journal, purpose, is_batch_invariant=engine.is_batch_invariant)
    count_journaled(found.values(), purpose)
    asked: dict[str, tuple[Request, PromptRequest, list[int]]] = {}
    for draw in draws:
        left = [i for i in range(draw.samples) if (str(draw.group), i) not in found]
        if left:
            whole = _request(draw, renderer, sampling, seed, purpose, version)
            is_whole = len(left) == draw.samples
            some = whole if is_whole else replace(whole, keys=tuple(whole.keys[i] for i in left))
            asked[some.id] = some, draw, left

    def finished(completion: Completion) -> None:
        request, draw, left = asked[completion.request]
        sample = left[completion.sample]
        rollout = _rollout(draw.group, sample, request.tokens, completion, renderer, version)
        found[request.id, sample] = rollout
        PROGRESS.add(purpose, draw.group.step)
        if journal is not None:
            journal.keep_rollout(purpose, rollout)

    for request, _, _ in asked.values():
        engine.submit(request)

    def answered() -> list[Group]:
        finish(engine, finished)
        return [_group(draw, found) for draw in draws]

    return answered


def _request(
    draw: PromptRequest,
    renderer: Renderer,
    sampling: Sampling,
    seed: int,
    purpose: str,
    version: int,
) -> Request:
    """What an engine is asked for all samples of a draw."""
    return Request(
        id=str(draw.group),
        tokens=tuple(renderer.prompt_tokens(draw.prompt.messages, draw.prompt.tools)),
        keys=tuple(sampling_key(seed, purpose, draw.group, i) for i in range(draw.samples)),
        sampling=sampling,
        weights=version,
    )


async def generate_groups(
    client: EngineClient,
    renderer: Renderer,
    draws: Sequence[PromptRequest],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
    journal: WorkJournal | None = None,
) -> list[Group]:
    """What `answer` gives, from an engine that others ask too, by this version of the weights."""
    found = _journaled(draws, journal, purpose, is_batch_invariant=client.is_batch_invariant)
    count_journaled(found.values(), purpose)

    async def one(draw: PromptRequest, prompt: tuple[int, ...], sample: int) -> None:
        key = sampling_key(seed, purpose, draw.group, sample)
        completion = await client.draw(prompt, key=key, sampling=sampling, weights=version)
        rollout = _rollout(draw.group, sample, prompt, completion, renderer, version)
        found[str(draw.group), sample] = rollout
        PROGRESS.add(purpose, draw.group.step)
        if journal is not None:
            journal.keep_rollout(purpose, rollout)

    asked: list[Coroutine[Any, Any, None]] = []
    for draw in draws:
        left = [i for i in range(draw.samples) if (str(draw.group), i) not in found]
        if left:
            prompt = tuple(renderer.prompt_tokens(draw.prompt.messages, draw.prompt.tools))
            asked += [one(draw, prompt, sample) for sample in left]
    await gather_or_cancel(asked)
    return [_group(draw, found) for draw in draws]


def count_journaled(rollouts: Iterable[Rollout], purpose: str) -> None:
    """Count what a journal has as done."""
    for rollout in rollouts:
        PROGRESS.add(purpose, rollout.group.step)


def _group(draw: PromptRequest, found: Mapping[tuple[str, int], Rollout]) -> Group:
    rollouts = tuple(found[str(draw.group), i] for i in range(draw.samples))
    return Group(prompt=draw.prompt, rollouts=rollouts)


def _journaled(
    draws: Sequence[PromptRequest],
    journal: WorkJournal | None,
    purpose: str,
    *,
    is_batch_invariant: bool,
) -> dict[tuple[str, int], Rollout]:
    """Finished rollouts, by group and sample.

    Where an answer depends on what is drawn beside it, the rest would come out otherwise: there,
    all rollouts are taken or none.
    """
    if journal is None or not journal.has_known:
        return {}
    places = [(draw.group, i) for draw in draws for i in range(draw.samples)]
    looked_up = {(str(g), i): journal.rollout(purpose, g, i) for g, i in places}
    found = {place: rollout for place, rollout in looked_up.items() if rollout is not None}
    return found if is_batch_invariant or len(found) == len(places) else {}


def sampling_key(seed: int, purpose: str, group: GroupId, sample: int, turn: int = 0) -> int:
    """The address of one turn's random numbers."""
    return derive_key(seed, purpose, group.step, group.draw, group.uid, sample, turn)


def _rollout(
    group: GroupId,
    sample: int,
    prompt: tuple[int, ...],
    completion: Completion,
    renderer: Renderer,
    version: int,
) -> Rollout:
    before, drawn = len(prompt), len(completion.tokens)
    return Rollout(
        group=group,
        sample=sample,
        tokens=prompt + completion.tokens,
        sources=(Source.PROMPT,) * before + (Source.SAMPLED,) * drawn,
        turns=(0,) * (before + drawn),
        logps=(None,) * before + completion.logps,
        versions=(None,) * before + (completion.versions or (version,) * drawn),
        stop=_STOPS[completion.reason],
        text=renderer.text_of(completion.tokens),
        kept_mass=(None,) * before + completion.kept_mass if completion.kept_mass else (),
    )
