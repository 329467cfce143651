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

T = TypeVar("T")


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; after the first error the rest is cancelled and awaited, then it is raised.

    It is raised as it is, not in an exception group: callers match errors by type.
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
    """A prompt at its position in the run, and the number of samples to generate.

    Example:
        >>> PromptRequest(group=GroupId(step=0, draw=1, uid="a"), prompt=None, samples=4).samples
        4
    """

    group: GroupId
    """Step, index in the step, and the prompt's uid."""
    prompt: Prompt
    """The prompt."""
    samples: int
    """Number of samples."""


def prompt_requests(
    prompts: Sequence[Prompt], *, step: int, first: int, samples: int
) -> list[PromptRequest]:
    """One request for each prompt; its `GroupId` is the address that random numbers derive from."""
    return [
        PromptRequest(
            group=GroupId(step=step, draw=first + i, uid=prompt.uid), prompt=prompt, samples=samples
        )
        for i, prompt in enumerate(prompts)
    ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt request.

    Example:
        >>> Group(prompt=None, rollouts=()).rollouts
        ()
    """

    prompt: Prompt
    """The prompt."""
    rollouts: tuple[Rollout, ...]
    """Its rollouts, by sample index."""


def submit_requests(
    engine: RolloutEngine,
    renderer: Renderer,
    requests: Sequence[PromptRequest],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
    journal: WorkJournal | None = None,
) -> Callable[[], list[Group]]:
    """Submit all requests without blocking; call the result to finish them and get the groups.

    Rollouts in the journal are not generated again; new ones are journaled as they finish.
    """
    found = _from_journal(requests, journal, purpose, is_batch_invariant=engine.is_batch_invariant)
    count_journaled(found.values(), purpose)
    pending: dict[str, tuple[Request, PromptRequest, list[int]]] = {}
    for prompt_request in requests:
        left = _missing(prompt_request, found)
        if left:
            whole = _request(prompt_request, renderer, sampling, seed, purpose, version)
            is_whole = len(left) == prompt_request.samples
            some = whole if is_whole else replace(whole, keys=tuple(whole.keys[i] for i in left))
            pending[some.id] = some, prompt_request, left

    def finished(completion: Completion) -> None:
        request, prompt_request, left = pending[completion.request]
        group, sample = prompt_request.group, left[completion.sample]
        rollout = _rollout(group, sample, request.tokens, completion, renderer, version)
        found[request.id, sample] = rollout
        PROGRESS.add(purpose, group.step)
        if journal is not None:
            journal.keep_rollout(purpose, rollout)

    for request, _, _ in pending.values():
        engine.submit(request)

    def collect() -> list[Group]:
        finish(engine, finished)
        return [_group(prompt_request, found) for prompt_request in requests]

    return collect


def _request(
    prompt_request: PromptRequest,
    renderer: Renderer,
    sampling: Sampling,
    seed: int,
    purpose: str,
    version: int,
) -> Request:
    """The engine request for all samples of a prompt."""
    return Request(
        id=str(prompt_request.group),
        tokens=tuple(
            renderer.prompt_tokens(prompt_request.prompt.messages, prompt_request.prompt.tools)
        ),
        keys=tuple(
            sampling_key(seed, purpose, prompt_request.group, i)
            for i in range(prompt_request.samples)
        ),
        sampling=sampling,
        weights=version,
    )


async def generate_groups(
    client: EngineClient,
    renderer: Renderer,
    requests: Sequence[PromptRequest],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
    journal: WorkJournal | None = None,
) -> list[Group]:
    """Groups of all requests, generated through a shared engine with this weight version."""
    found = _from_journal(requests, journal, purpose, is_batch_invariant=client.is_batch_invariant)
    count_journaled(found.values(), purpose)

    async def one(prompt_request: PromptRequest, prompt: tuple[int, ...], sample: int) -> None:
        key = sampling_key(seed, purpose, prompt_request.group, sample)
        completion = await client.generate(prompt, key=key, sampling=sampling, weights=version)
        rollout = _rollout(prompt_request.group, sample, prompt, completion, renderer, version)
        found[str(prompt_request.group), sample] = rollout
        PROGRESS.add(purpose, prompt_request.group.step)
        if journal is not None:
            journal.keep_rollout(purpose, rollout)

    pending: list[Coroutine[Any, Any, None]] = []
    for prompt_request in requests:
        left = _missing(prompt_request, found)
        if left:
            prompt = tuple(
                renderer.prompt_tokens(prompt_request.prompt.messages, prompt_request.prompt.tools)
            )
            pending += [one(prompt_request, prompt, sample) for sample in left]
    await gather_or_cancel(pending)
    return [_group(prompt_request, found) for prompt_request in requests]


def count_journaled(rollouts: Iterable[Rollout], purpose: str) -> None:
    """Count rollouts from the journal as finished."""
    for rollout in rollouts:
        PROGRESS.add(purpose, rollout.group.step)


def _missing(prompt_request: PromptRequest, found: Mapping[tuple[str, int], Rollout]) -> list[int]:
    """Samples of a request that are still to be generated."""
    group = str(prompt_request.group)
    return [i for i in range(prompt_request.samples) if (group, i) not in found]


def _group(prompt_request: PromptRequest, found: Mapping[tuple[str, int], Rollout]) -> Group:
    rollouts = tuple(found[str(prompt_request.group), i] for i in range(prompt_request.samples))
    return Group(prompt=prompt_request.prompt, rollouts=rollouts)


def _from_journal(
    requests: Sequence[PromptRequest],
    journal: WorkJournal | None,
    purpose: str,
    *,
    is_batch_invariant: bool,
) -> dict[tuple[str, int], Rollout]:
    """Finished rollouts, by group and sample.

    Without batch invariance the remaining rollouts would differ when generated alone: then the
    journal is used only if it has all of them.
    """
    if journal is None or not journal.has_known:
        return {}
    addresses = [
        (prompt_request.group, i)
        for prompt_request in requests
        for i in range(prompt_request.samples)
    ]
    looked_up = {(str(g), i): journal.rollout(purpose, g, i) for g, i in addresses}
    found = {place: rollout for place, rollout in looked_up.items() if rollout is not None}
    return found if is_batch_invariant or len(found) == len(addresses) else {}


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
    before, generated = len(prompt), len(completion.tokens)
    return Rollout(
        group=group,
        sample=sample,
        tokens=prompt + completion.tokens,
        sources=(Source.PROMPT,) * before + (Source.SAMPLED,) * generated,
        turns=(0,) * (before + generated),
        logps=(None,) * before + completion.logps,
        versions=(None,) * before + (completion.versions or (version,) * generated),
        stop=_STOPS[completion.reason],
        text=renderer.text_of(completion.tokens),
        kept_mass=(None,) * before + completion.kept_mass if completion.kept_mass else (),
        routes=completion.routes,
    )
