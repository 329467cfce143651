"""Conversations of all draws of a step, side by side; what fails is handled by a stated policy."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import final

from luyen.base.loops import loosened
from luyen.base.records import Prompt, Rollout
from luyen.rollout.client import EngineClient
from luyen.rollout.compared import compared
from luyen.rollout.converse import Conversation
from luyen.rollout.fault_policy import FaultPolicy, faulty_rollouts
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.setting import Address, Setting
from luyen.rollout.side_by_side import side_by_side
from luyen.rollout.single_turn import Draw, Group
from luyen.rollout.tools.box import ToolBox
from luyen.rollout.tools.ledger import CallLedger
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.progress import PROGRESS

_LAST_S = 5.0
"""How long what still runs at the end of a run may take to end."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Playing:
    """What the conversations of one generation have in common.

    Example:
        >>> sorted(_Playing.__slots__)[0]
        'client'
    """

    client: EngineClient
    """What draws."""
    setting: Setting
    """What they share with all conversations of the run."""
    sampling: Sampling
    """How tokens are drawn."""
    seed: int
    """The run's seed."""
    purpose: str
    """What they are drawn for."""
    version: int
    """Version of the weights."""
    policy: FaultPolicy
    """What becomes of those that break."""
    journal: WorkJournal | None
    """Where those that are finished are found and kept."""

    async def one(self, draw: Draw, sample: int) -> Rollout:
        """One rollout: from the journal, or played, and played again where the policy says so."""
        if self.journal is not None:
            kept = self.journal.rollout(self.purpose, draw.group, sample)
            if kept is not None:
                PROGRESS.add(self.purpose, draw.group.step)
                return kept
        played = await self._played(draw, sample)
        PROGRESS.add(self.purpose, draw.group.step)
        if self.journal is not None and played.fault is None:
            self.journal.keep_rollout(self.purpose, played)
        return played

    async def _played(self, draw: Draw, sample: int) -> Rollout:
        address = Address(seed=self.seed, purpose=self.purpose, group=draw.group, sample=sample)
        clock, budget = asyncio.get_running_loop().time, self.setting.time_budget_s
        deadline = None if budget is None else clock() + budget
        for attempt in range(self.policy.attempts):
            rollout = await Conversation(
                address,
                draw.prompt,
                self.setting,
                client=self.client,
                sampling=self.sampling,
                version=self.version,
                deadline=deadline,
                ledger=self._ledger(address, attempt),
            ).play()
            is_last = attempt + 1 == self.policy.attempts or (deadline or inf) <= clock()
            # To play again what may have acted would be to make the call again after all.
            if rollout.fault is None or is_last or rollout.notes.get("unknown"):
                return replace(rollout, notes={**rollout.notes, "retries": float(attempt)})
        raise AssertionError("a conversation is played at least once")

    def _ledger(self, address: Address, attempt: int) -> CallLedger | None:
        if self.journal is None:
            return None
        place = address.place(attempt=attempt)
        return CallLedger(self.journal, place, on_unknown=self.setting.on_unknown)


async def converse_all(
    client: EngineClient,
    setting: Setting,
    draws: Sequence[Draw],
    sampling: Sampling,
    *,
    seed: int,
    purpose: str,
    version: int,
    policy: FaultPolicy,
    journal: WorkJournal | None = None,
) -> list[Group]:
    """Rollouts of every draw, in the order of the draws, whatever finished first.

    Rollouts with a fault are among them, so that they are recorded. The time budget holds for a
    rollout with all its attempts. Rollouts that the journal has are not played again.
    """
    playing = _Playing(
        client=client,
        setting=setting,
        sampling=sampling,
        seed=seed,
        purpose=purpose,
        version=version,
        policy=policy,
        journal=journal,
    )
    played = await side_by_side([playing.one(d, i) for d in draws for i in range(d.samples)])
    rollouts = iter(played)
    return [
        Group(prompt=d.prompt, rollouts=tuple(next(rollouts) for _ in range(d.samples)))
        for d in draws
    ]


@final
class Conversations:
    """Plays the conversations of a run, step after step, in one event loop.

    Connections of tools and worlds live in that loop, so it lasts as long as the run.
    """

    def __init__(self, setting: Setting, policy: FaultPolicy) -> None:
        self._setting = setting
        self._policy = policy
        # The loop is made when conversations begin: those that others play need none.
        self._runner = asyncio.Runner(loop_factory=lambda: loosened(asyncio.new_event_loop()))
        self._begun: EngineClient | None = None
        """What conversations ask that were begun last."""
        self._is_closed = False

    def begin(
        self,
        engine: RolloutEngine,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        seed: int,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Callable[[], list[Group]]:
        """Hand in the first turns; who asks the result plays the conversations to their end.

        Those that broke are among the rollouts, with their fault. Nothing goes on before, so
        conversations that open something, or whose time is limited, are not begun before either.
        """
        client = EngineClient(engine)

        async def talk() -> list[Group]:
            return await self.converse(
                client,
                draws,
                sampling,
                seed=seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )

        async def handed_in() -> asyncio.Task[list[Group]]:
            talking = asyncio.create_task(talk())
            await client.settle()
            return talking

        self._begun = client
        talking = self._runner.run(handed_in()) if self._open_nothing else None

        async def played() -> list[Group]:
            async with client.running():
                return await (talking or talk())

        return lambda: self._runner.run(played())

    @property
    def _open_nothing(self) -> bool:
        how = self._setting
        return how.tools.is_standing and not how.has_worlds and how.time_budget_s is None

    async def converse(
        self,
        client: EngineClient,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        seed: int,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """Rollouts of every draw, in the event loop of the caller, who must `wind_down` in it."""
        return await converse_all(
            client,
            self._setting,
            draws,
            sampling,
            seed=seed,
            purpose=purpose,
            version=version,
            policy=self._policy,
            journal=journal,
        )

    async def wind_down(self) -> None:
        """End what still runs in this event loop, and close the tools; `close` has no work left."""
        self._is_closed = True
        await _wound_down(self._setting.tools)

    def compared(self, rollout: Rollout, prompt: Prompt) -> Rollout:
        """The rollout with how faithful its tokens are; see `luyen.rollout.compared`."""
        return compared(rollout, prompt, self._setting)

    def faulty(
        self, groups: Iterable[Group], *, is_learned_from: bool, may_be_all: bool = False
    ) -> list[Rollout]:
        """The rollouts to leave out; a UserError when the policy is to stop."""
        policy = self._policy if is_learned_from else replace(self._policy, min_samples=1)
        return faulty_rollouts(groups, policy, may_be_all=may_be_all)

    def close(self) -> None:
        """Close tools and the event loop. Closing twice is allowed.

        What an interrupt left behind is cancelled; code that will not end is left to itself.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._begun is not None:
            self._begun.leave()
        loop = self._runner.get_loop()
        self._runner.run(_wound_down(self._setting.tools))
        if asyncio.all_tasks(loop):
            loop.close()  # the runner would wait for them for ever
        else:
            self._runner.close()


async def _wound_down(tools: ToolBox) -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_LAST_S)
    await tools.close()
