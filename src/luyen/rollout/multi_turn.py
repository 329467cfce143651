"""Multi-turn generation: all conversations of a step, concurrently, under a fault policy."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypeAlias, final

from luyen.base.boundary import with_daemon_threads
from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout
from luyen.rollout.client import EngineClient
from luyen.rollout.conversation import Conversation
from luyen.rollout.conversation_config import ConversationConfig, RolloutAddress
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.single_turn import Group, PromptRequest, gather_or_cancel
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.rollout_tools import CallJournal
from luyen.rollout.transcript import check_retokenization
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.progress import PROGRESS

OnFault: TypeAlias = Literal["fail", "retry", "keep_min"]
"""On a failed conversation: stop the run, retry it, or drop it."""
_FIELD = "actor_rollout_ref.rollout.multi_turn.on_fault"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """What happens to conversations that failed.

    Example:
        >>> FaultPolicy(on_fault="retry").attempts
        2
    """

    on_fault: OnFault = "retry"
    """Stop the run, retry the conversation, or drop it."""
    retries: int = 1
    """With `retry`: retries before a conversation is dropped."""
    min_samples: int = 1
    """Valid rollouts that a group needs for training; with fewer, the whole group is dropped."""

    @property
    def attempts(self) -> int:
        """Most attempts at a conversation."""
        return 1 + (self.retries if self.on_fault == "retry" else 0)


def faulty_rollouts(
    groups: Iterable[Group], policy: FaultPolicy, *, may_be_all: bool = False
) -> list[Rollout]:
    """The rollouts to leave out of training: failed ones, and groups with too few valid ones.

    A UserError when the policy is to stop at a fault, or when nothing would be left, unless these
    are only some of the groups and that `may_be_all`.
    """
    every = list(groups)
    broken = [r for group in every for r in group.rollouts if r.fault is not None]
    if not broken:
        return []
    out: list[Rollout] = []
    for group in every:
        bad = [r for r in group.rollouts if r.fault is not None]
        is_thin = bool(bad) and len(group.rollouts) - len(bad) < policy.min_samples
        out += group.rollouts if is_thin else bad
    total = sum(len(group.rollouts) for group in every)
    if policy.on_fault == "fail" or (len(out) == total and not may_be_all):
        first = broken[0]
        why = f"{len(broken)} of {total} conversations broke; the first ({first.group}, sample "
        why += f"{first.sample}): {first.fault}"
        fix = "fix the tool or environment, or set it to retry or keep_min"
        raise UserError(_FIELD, policy.on_fault, why, fix)
    return out


_LAST_S = 5.0
"""Most seconds that pending tasks get to end when the run closes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ConversationBatch:
    """Arguments that all conversations of one generation share.

    Example:
        >>> sorted(_ConversationBatch.__slots__)[0]
        'client'
    """

    client: EngineClient
    """The shared engine."""
    config: ConversationConfig
    """Configuration of all conversations of the run."""
    sampling: Sampling
    """Sampling parameters."""
    seed: int
    """The run's seed."""
    purpose: str
    """What the rollouts are for: part of their random address."""
    version: int
    """Version of the weights."""
    policy: FaultPolicy
    """What happens to those that fail."""
    journal: WorkJournal | None
    """Finished rollouts are looked up and written here."""

    async def one(self, request: PromptRequest, sample: int) -> Rollout:
        """One rollout: from the journal, or generated, with retries if the fault policy allows."""
        if self.journal is not None:
            kept = self.journal.rollout(self.purpose, request.group, sample)
            if kept is not None:
                PROGRESS.add(self.purpose, request.group.step)
                return kept
        rollout = await self._run_conversation(request, sample)
        PROGRESS.add(self.purpose, request.group.step)
        if self.journal is not None and rollout.fault is None:
            self.journal.keep_rollout(self.purpose, rollout)
        return rollout

    async def _run_conversation(self, request: PromptRequest, sample: int) -> Rollout:
        address = RolloutAddress(
            seed=self.seed, purpose=self.purpose, group=request.group, sample=sample
        )
        clock, budget = asyncio.get_running_loop().time, self.config.time_budget_s
        deadline = None if budget is None else clock() + budget
        for attempt in range(self.policy.attempts):
            rollout = await Conversation(
                address,
                request.prompt,
                self.config,
                client=self.client,
                sampling=self.sampling,
                version=self.version,
                deadline=deadline,
                ledger=self._ledger(address, attempt),
            ).run()
            is_last = attempt + 1 == self.policy.attempts or (deadline or inf) <= clock()
            # A retry would repeat a call that may have acted already.
            if rollout.fault is None or is_last or rollout.notes.get("unknown"):
                return replace(rollout, notes={**rollout.notes, "retries": float(attempt)})
        raise AssertionError("a conversation is run at least once")

    def _ledger(self, address: RolloutAddress, attempt: int) -> CallJournal | None:
        if self.journal is None:
            return None
        place = address.place(attempt=attempt)
        return CallJournal(self.journal, place, on_unknown=self.config.on_unknown)


async def run_conversations(
    client: EngineClient,
    config: ConversationConfig,
    requests: Sequence[PromptRequest],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
    policy: FaultPolicy,
    journal: WorkJournal | None = None,
) -> list[Group]:
    """Groups of all requests, in their order.

    Rollouts with a fault are included, so that they are recorded. The time budget covers all
    attempts at a rollout. Rollouts in the journal are not generated again.
    """
    batch = _ConversationBatch(
        client=client,
        config=config,
        sampling=sampling,
        seed=seed,
        purpose=purpose,
        version=version,
        policy=policy,
        journal=journal,
    )
    finished = await gather_or_cancel([batch.one(r, i) for r in requests for i in range(r.samples)])
    rollouts = iter(finished)
    return [
        Group(prompt=r.prompt, rollouts=tuple(next(rollouts) for _ in range(r.samples)))
        for r in requests
    ]


@final
class Conversations:
    """Runs the conversations of all steps in one event loop.

    Connections of tools and environments live in that loop, so it lasts as long as the run.
    """

    def __init__(self, config: ConversationConfig, policy: FaultPolicy) -> None:
        self._config = config
        self._policy = policy
        # The loop is made at the first `begin`: `converse` runs in the caller's loop instead.
        self._runner = asyncio.Runner(
            loop_factory=lambda: with_daemon_threads(asyncio.new_event_loop())
        )
        self._client: EngineClient | None = None
        """Client of the conversations that were begun last."""
        self._is_closed = False

    def begin(
        self,
        engine: RolloutEngine,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        seed: int,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Callable[[], list[Group]]:
        """Submit the first turns without blocking; call the result to run the conversations.

        Failed rollouts are included, with their fault. If conversations open tools or
        environments, or have a time budget, nothing is submitted before that call.
        """
        client = EngineClient(engine)

        async def run_all() -> list[Group]:
            return await self.converse(
                client,
                requests,
                sampling,
                seed=seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )

        async def submit_first_turns() -> asyncio.Task[list[Group]]:
            task = asyncio.create_task(run_all())
            await client.submit_ready()
            return task

        self._client = client
        task = self._runner.run(submit_first_turns()) if self._can_submit_early else None

        async def run_to_end() -> list[Group]:
            async with client.running():
                return await (task or run_all())

        return lambda: self._runner.run(run_to_end())

    @property
    def _can_submit_early(self) -> bool:
        config = self._config
        return config.tools.is_shared and not config.has_envs and config.time_budget_s is None

    async def converse(
        self,
        client: EngineClient,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        seed: int,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """Groups of all requests, in the caller's event loop; `wind_down` must be called in it."""
        return await run_conversations(
            client,
            self._config,
            requests,
            sampling,
            seed=seed,
            purpose=purpose,
            version=version,
            policy=self._policy,
            journal=journal,
        )

    async def wind_down(self) -> None:
        """Cancel pending tasks of this event loop and close the tools; replaces `close`."""
        self._is_closed = True
        await _shut_down(self._config.tools)

    def compared(self, rollout: Rollout, prompt: Prompt) -> Rollout:
        """The rollout after its re-tokenization check; see `luyen.rollout.transcript`."""
        return check_retokenization(rollout, prompt, self._config)

    def faulty(
        self, groups: Iterable[Group], *, is_learned_from: bool, may_be_all: bool = False
    ) -> list[Rollout]:
        """The rollouts to leave out; a UserError when the policy is to stop."""
        policy = self._policy if is_learned_from else replace(self._policy, min_samples=1)
        return faulty_rollouts(groups, policy, may_be_all=may_be_all)

    def close(self) -> None:
        """Close tools and the event loop. Closing twice is allowed.

        Pending tasks are cancelled; a task that ignores the cancellation is abandoned.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._client is not None:
            self._client.abort_all()
        loop = self._runner.get_loop()
        self._runner.run(_shut_down(self._config.tools))
        if asyncio.all_tasks(loop):
            loop.close()  # the runner would wait for them for ever
        else:
            self._runner.close()


async def _shut_down(tools: ToolRegistry) -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_LAST_S)
    await tools.close()
