"""Rollouts of a run: answers or conversations, from whatever engine draws."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from luyen.base.records import Prompt, Rollout
from luyen.data.render import Renderer
from luyen.rollout.client import EngineClient
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.single_turn import Draw, Group, answer_all, answering
from luyen.telemetry.journal import WorkJournal


@final
class Generation:
    """How the rollouts of a run are made. It holds no weights and no engine."""

    def __init__(
        self, *, renderer: Renderer, seed: int, conversations: Conversations | None = None
    ) -> None:
        """`conversations` plays several turns; without it every rollout is one answer."""
        self.renderer = renderer
        self.seed = seed
        self.conversations = conversations

    def play(
        self,
        engine: RolloutEngine,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """Rollouts of every draw; those that the journal has are not made again.

        Whether their tokens are sound is not known before somebody asks for it (`compared`).
        """
        begun = self.begin(
            engine, draws, sampling, purpose=purpose, version=version, journal=journal
        )
        return begun()

    def begin(
        self,
        engine: RolloutEngine,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Callable[[], list[Group]]:
        """Ask the engine for what comes first; who asks the result gets what `play` gives.

        An engine that works elsewhere goes to work meanwhile.
        """
        if self.conversations is not None:
            return self.conversations.begin(
                engine,
                draws,
                sampling,
                seed=self.seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )
        return answering(
            engine,
            self.renderer,
            draws,
            sampling,
            seed=self.seed,
            purpose=purpose,
            version=version,
            journal=journal,
        )

    async def converse(
        self,
        client: EngineClient,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """What `play` gives, beside other generations in the event loop of the caller."""
        if self.conversations is not None:
            return await self.conversations.converse(
                client,
                draws,
                sampling,
                seed=self.seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )
        return await answer_all(
            client,
            self.renderer,
            draws,
            sampling,
            seed=self.seed,
            purpose=purpose,
            version=version,
            journal=journal,
        )

    def compared(self, rollout: Rollout, prompt: Prompt) -> Rollout:
        """A rollout whose tokens are sound, or a UserError; its notes count what is odd in them."""
        talks = self.conversations
        return rollout if talks is None else talks.compared(rollout, prompt)

    def all_compared(self, groups: Sequence[Group]) -> list[Group]:
        """Groups of rollouts whose tokens are sound."""
        return [
            replace(g, rollouts=tuple(self.compared(r, g.prompt) for r in g.rollouts))
            for g in groups
        ]

    async def wind_down(self) -> None:
        """Let the tools go, in the event loop that `converse` ran in."""
        if self.conversations is not None:
            await self.conversations.wind_down()

    def broken(self, groups: Sequence[Group], *, purpose: str) -> list[Rollout]:
        """Rollouts that no reward should judge; a UserError when they are to stop the run."""
        if self.conversations is None:
            return []
        return self.conversations.faulty(groups, is_learned_from=purpose == "rollout")

    def close(self) -> None:
        """Let the tools go."""
        if self.conversations is not None:
            self.conversations.close()
