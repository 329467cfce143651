"""The tokens of a conversation, append-only with their origin, and the re-tokenization check."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from luyen.base.records import (
    Branch,
    ExpertRoutes,
    GroupId,
    Message,
    Prompt,
    Rollout,
    Source,
    StopReason,
    ToolCall,
    join_routes,
)
from luyen.data.render import Extension
from luyen.data.retokenization_check import check_against_render
from luyen.rollout.conversation_config import ConversationConfig
from luyen.rollout.protocol import Completion


@final
class Transcript:
    """An append-only token list with its streams, and the branches closed before it.

    Example:
        >>> transcript = Transcript((5, 6))
        >>> transcript.say(Completion(request="a", sample=0, tokens=(7,), logps=(-0.5,),
        ...                           reason="stop"), turn=0, version=3)
        >>> transcript.branch().logps
        (None, None, -0.5)
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """`prompt` is what the policy reads first."""
        self.earlier: list[Branch] = []
        self.sampled = 0
        """Tokens that the policy has sampled, over all branches."""
        self._begin(prompt, turn=0)

    def __len__(self) -> int:
        """Tokens of the current branch."""
        return len(self.tokens)

    def say(self, completion: Completion, *, turn: int, version: int) -> None:
        """Append what the policy sampled."""
        count = len(completion.tokens)
        self.sampled += count
        self.tokens += completion.tokens
        self.sources += [Source.SAMPLED] * count
        self.turns += [turn] * count
        self.logps += completion.logps
        self.versions += completion.versions or [version] * count
        self.kept_mass += completion.kept_mass or [None] * count
        self.routes = join_routes(self.routes, completion.routes)

    def answer(self, extension: Extension, *, turn: int) -> None:
        """Append what leads to the policy's next turn, or begin a new branch if it restarts."""
        if extension.restart is not None:
            self.earlier.append(self.branch())
            self._begin(extension.tokens, turn=turn)
            return
        self.tokens += extension.tokens
        self.sources += extension.sources
        self._unsampled(len(extension.tokens), turn)

    def length_after(self, extension: Extension) -> int:
        """Tokens of the current branch after the extension."""
        return len(extension.tokens) + (0 if extension.restart is not None else len(self))

    def branch(self) -> Branch:
        """The current branch."""
        return Branch(
            tokens=tuple(self.tokens),
            sources=tuple(self.sources),
            turns=tuple(self.turns),
            logps=tuple(self.logps),
            versions=tuple(self.versions),
            kept_mass=tuple(self.kept_mass) if any(self.kept_mass) else (),
            routes=self.routes,
        )

    def rollout(
        self,
        *,
        group: GroupId,
        sample: int,
        stop: StopReason,
        text: str,
        fault: str | None,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        given: Sequence[tuple[int, float]],
        notes: Mapping[str, float],
    ) -> Rollout:
        """The finished record."""
        last = self.branch()
        streams: dict[str, Any] = {name: getattr(last, name) for name in Branch.__slots__}
        return Rollout(
            **streams,
            group=group,
            sample=sample,
            stop=stop,
            text=text,
            fault=fault,
            calls=tuple(calls),
            messages=tuple(messages),
            earlier=tuple(self.earlier),
            given=tuple(given),
            notes=dict(notes),
        )

    def _begin(self, prompt: Sequence[int], *, turn: int) -> None:
        self.tokens: list[int] = list(prompt)
        self.sources: list[Source] = [Source.PROMPT] * len(prompt)
        self.turns: list[int] = []
        self.logps: list[float | None] = []
        self.versions: list[int | None] = []
        self.kept_mass: list[float | None] = []
        self.routes: ExpertRoutes | None = None
        self._unsampled(len(prompt), turn)

    def _unsampled(self, count: int, turn: int) -> None:
        self.turns += [turn] * count
        self.logps += [None] * count
        self.versions += [None] * count
        self.kept_mass += [None] * count


# The re-tokenization check: incrementally built tokens against a full rendering of the messages.
# It changes only counters in a rollout's notes, or stops the run, so it may be deferred.

UNCHECKED = "unchecked"
"""Note of a rollout whose last branch was not checked yet."""


def check_retokenization(rollout: Rollout, prompt: Prompt, config: ConversationConfig) -> Rollout:
    """The rollout with the mismatch counts of its last branch; unchanged, if it was checked.

    A UserError where tokens and template disagree and the check mode is to stop.
    """
    if UNCHECKED not in rollout.notes:
        return rollout
    notes = {name: value for name, value in rollout.notes.items() if name != UNCHECKED}
    messages = (*prompt.messages, *rollout.messages)
    return replace(
        rollout, notes=add_mismatch_counts(notes, rollout, messages, prompt.tools, config)
    )


def add_mismatch_counts(
    notes: Mapping[str, float],
    branch: Branch | Rollout,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    config: ConversationConfig,
) -> dict[str, float]:
    """The notes, plus the mismatch counts of a branch that ends with the last message."""
    found = check_against_render(
        config.renderer, branch=branch, messages=messages, tools=tools, mode=config.sanity
    )
    return {**notes, **{name: notes.get(name, 0.0) + count for name, count in found.items()}}
