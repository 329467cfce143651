"""The records that move between packages: prompts, rollouts, tool calls and scores.

Every record here is frozen, survives pickling, and is checked once, when it is made.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias, final

from luyen.base.secrets import masked

# The status of a tool call that a policy wrote.


class CallStatus(StrEnum):
    """How a call ended. The set is closed; every status but `OK` has a counter of its own."""

    OK = "ok"
    MALFORMED = "malformed"
    """It could not be read: broken JSON, an open tag."""
    UNKNOWN_TOOL = "unknown tool"
    INVALID_ARGUMENTS = "invalid arguments"
    """The arguments do not fit the tool's schema."""
    REFUSED = "refused"
    """It was one too many: of this turn, or of the rollout."""
    FAILED = "failed"
    """The tool raised, died, or returned something that is no text."""
    TIMED_OUT = "timed out"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, with what came back.

    Example:
        >>> call = ToolCall(turn=0, name="calculator", arguments={"expression": "6*7"},
        ...                 status=CallStatus.OK, result="42")
        >>> call.is_valid, call.has_run
        (True, True)
    """

    turn: int
    """Assistant turn that wrote it."""
    name: str
    """The tool's name as written; empty when it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the policy passed."""
    status: CallStatus
    """How it ended."""
    result: str
    """What the policy read about it, after truncation."""
    error: str | None = None
    """What went wrong, if anything did."""
    reward: float | None = None
    """What the tool itself thought of the call; None when it has no opinion."""
    seconds: float = 0.0
    """How long it ran, waiting for a free place not counted."""
    attempts: int = 0
    """How often it was tried."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", masked(self.error))

    @property
    def is_valid(self) -> bool:
        """Whether the policy called a tool that exists with arguments that fit."""
        return self.has_run or self.status == CallStatus.REFUSED

    @property
    def has_run(self) -> bool:
        """Whether the tool was started."""
        return self.status in (CallStatus.OK, CallStatus.FAILED, CallStatus.TIMED_OUT)


Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `role`, `content`, and other keys of the chat template."""


class Source(IntEnum):
    """Where a token came from. Masks are made from this, never from a token's value."""

    PROMPT = 0
    SAMPLED = 1
    TOOL = 2
    TEMPLATE = 3


class StopReason(StrEnum):
    """Why a rollout ended. The set is closed."""

    ANSWERED = "answered"
    TOKEN_BUDGET = "token budget"
    MAX_ASSISTANT_TURNS = "max assistant turns"
    MAX_USER_TURNS = "max user turns"
    TOOL_BUDGET = "tool budget"
    TIME_BUDGET = "time budget"
    PARSE_FAILURE = "parse failure"
    ENVIRONMENT_DONE = "environment done"
    ABORTED = "aborted"
    FAULT = "fault"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of the policy, and what a reward needs to score the response.

    Example:
        >>> prompt = make_prompt([{"role": "user", "content": "1+1?"}], data_source="sum",
        ...                      ground_truth="2")
        >>> prompt.uid == make_prompt(prompt.messages, data_source="sum", ground_truth="2").uid
        True
    """

    uid: str
    """Hash of the content: the same prompt has the same uid in every run."""
    messages: tuple[Message, ...]
    """The conversation so far."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools on offer."""
    data_source: str = ""
    """Selects the reward that scores the response."""
    ground_truth: Any = None
    """What the reward compares with."""
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Anything else the row carried."""


def make_prompt(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    data_source: str = "",
    ground_truth: Any = None,
    extra_info: Mapping[str, Any] | None = None,
) -> Prompt:
    """A prompt whose uid is the hash of its messages and of what it is scored by."""
    content = [list(messages), list(tools), data_source, ground_truth]
    text = json.dumps(content, sort_keys=True, default=str, ensure_ascii=False)
    return Prompt(
        uid=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        messages=tuple(messages),
        tools=tuple(tools),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=dict(extra_info or {}),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupId:
    """One occurrence of a prompt in a batch: the same prompt sampled twice makes two groups.

    Example:
        >>> str(GroupId(step=3, draw=0, uid="a1"))
        '3.0.a1'
    """

    step: int
    """Step that the group belongs to."""
    draw: int
    """Index of the group inside the step."""
    uid: str
    """The prompt's uid."""

    def __str__(self) -> str:
        return f"{self.step}.{self.draw}.{self.uid}"


MOST_REPLY = 16_384
"""Characters of a judge's reply that a score keeps."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with its parts: every number says where it came from.

    Example:
        >>> Score(name="total", value=1.0, parts=(Score(name="exact", value=1.0),)).flat()
        {'total': 1.0, 'total/exact': 1.0}
    """

    name: str
    """Name of the component."""
    value: float | None
    """The score; None when it could not be computed (`error` says why), never 0 instead."""
    weight: float = 1.0
    """Factor with which it enters the score above it."""
    parts: "tuple[Score, ...]" = ()
    """What it was made from."""
    error: str | None = None
    """Why there is no value."""
    by_turn: tuple[tuple[int, float], ...] = ()
    """Shares of the value that belong to assistant turns; the rest belongs to the whole."""
    raw: float | None = None
    """The raw value, if scaling, clipping or normalising changed it."""
    gated: bool = False
    """Whether it was not scored because a gate was closed; the value is the gate's substitute."""
    combine: str = "sum"
    """How the parts made the value."""
    turned: bool = False
    """Whether a negative scale inverted it: a larger raw value is worth less."""
    seconds: float | None = field(default=None, compare=False)
    """Scoring time; no part of the score's identity."""
    reply: str | None = field(default=None, compare=False)
    """What a judge said, up to `MOST_REPLY` characters; no part of the score's identity."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", masked(self.error))
        if self.reply is not None:
            object.__setattr__(self, "reply", masked(self.reply[:MOST_REPLY]))

    def remarks(self) -> str:
        """Remarks on the numbers, in brackets; empty if there are none.

        Example:
            >>> Score(name="brief", value=-1.0, raw=-2.5).remarks()
            ' (judged -2.5)'
        """
        notes = ["gated"] if self.gated else []
        notes += [f"judged {self.raw:g}"] if self.raw is not None and not self.gated else []
        notes += [self.combine] if self.combine != "sum" else []
        return f" ({', '.join(notes)})" if notes else ""

    def flat(self, prefix: str = "") -> dict[str, float | None]:
        """Every number of the tree by its path."""
        path = f"{prefix}{self.name}"
        found = {path: self.value}
        for part in self.parts:
            found |= part.flat(f"{path}/")
        return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoutes:
    """Experts that the routers of a mixture chose for the first tokens of a sequence.

    Example:
        >>> first = ExpertRoutes(layers=1, chosen=2, width=1, data=bytes([3, 0, 1, 2]))
        >>> first.tokens, list(first.padded(3))
        (2, [3, 0, 1, 2, 255, 255])
    """

    layers: int
    """Layers that have a router."""
    chosen: int
    """Experts of a token in a layer."""
    width: int
    """Bytes of an expert's number: 1 or 2."""
    data: bytes
    """Numbers of the experts, token by token and layer by layer, the likeliest first."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.layers * self.chosen * self.width

    @property
    def tokens(self) -> int:
        """Tokens whose experts are known."""
        return len(self.data) // self.token_bytes

    def padded(self, tokens: int) -> bytes:
        """The data of so many tokens; the largest number stands for what is not known."""
        return self.data.ljust(tokens * self.token_bytes, b"\xff")

    def to_bytes(self) -> bytes:
        """All of it."""
        return _ROUTES.pack(self.layers, self.chosen, self.width) + self.data

    @classmethod
    def from_bytes(cls, found: bytes) -> "ExpertRoutes":
        """Inverse of `to_bytes`; a ValueError for anything else."""
        if len(found) < _ROUTES.size:
            raise ValueError(f"{len(found)} bytes are no routes of experts")
        layers, chosen, width = _ROUTES.unpack_from(found)
        made = cls(layers=layers, chosen=chosen, width=width, data=found[_ROUTES.size :])
        if not layers or not chosen or width not in (1, 2) or len(made.data) % made.token_bytes:
            sizes = f"{layers} layers, {chosen} experts of {width} bytes"
            raise ValueError(f"{len(made.data)} bytes are no routes of {sizes}")
        return made


_ROUTES = struct.Struct("<HHB")


def join_routes(first: ExpertRoutes | None, later: ExpertRoutes | None) -> ExpertRoutes | None:
    """Routes of a sequence that was read twice: those of the first reading, as far as it went."""
    if first is None or later is None:
        return first or later
    return replace(first, data=first.data + later.data[len(first.data) :])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tokens of a conversation up to where a chat template rewrote what had been said.

    Example:
        >>> Branch(tokens=(5, 6), sources=(Source.PROMPT, Source.SAMPLED), turns=(0, 0),
        ...        logps=(None, -0.5), versions=(None, 0)).tokens
        (5, 6)
    """

    tokens: tuple[int, ...]
    """Ids, in order."""
    sources: tuple[Source, ...]
    """Where each came from."""
    turns: tuple[int, ...]
    """Assistant turn that each belongs to."""
    logps: tuple[float | None, ...]
    """Log-probability with which each sampled token was sampled."""
    versions: tuple[int | None, ...]
    """Version of the weights that drew each sampled token."""
    kept_mass: tuple[float | None, ...] = ()
    """Probability left by top-k, top-p and min-p where each was sampled; empty: they are off."""
    routes: ExpertRoutes | None = None
    """Experts that the sampler's routers chose for the first tokens; None: not recorded."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.sources), len(self.turns), len(self.logps)}
        lengths |= {len(self.kept_mass)} - {0}
        assert lengths == {len(self.versions)}, "streams of a branch differ in length"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One conversation as tokens, with the origin of each.

    Example:
        >>> rollout = Rollout(group=GroupId(step=0, draw=0, uid="a"), sample=0, tokens=(5, 6, 7),
        ...     sources=(Source.PROMPT, Source.SAMPLED, Source.SAMPLED), turns=(0, 0, 0),
        ...     logps=(None, -0.5, -0.1), versions=(None, 0, 0), stop=StopReason.ANSWERED,
        ...     text="ok")
        >>> rollout.response_length
        2
    """

    group: GroupId
    """Group that it belongs to."""
    sample: int
    """Index inside the group."""
    tokens: tuple[int, ...]
    """The whole conversation, prompt included; it only ever grew."""
    sources: tuple[Source, ...]
    """Where each token came from."""
    turns: tuple[int, ...]
    """Assistant turn that each token belongs to."""
    logps: tuple[float | None, ...]
    """Log-probability with which each token was sampled (temperature-scaled full softmax)."""
    versions: tuple[int | None, ...]
    """Version of the weights that drew each sampled token."""
    stop: StopReason
    """Why it ended."""
    text: str
    """The last assistant message, as decoded for the reward."""
    score: Score | None = None
    """Its reward, once scored."""
    fault: str | None = None
    """What went wrong, if anything did."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls, in the order they were written."""
    messages: tuple[Message, ...] = ()
    """What was said after the prompt; empty for a single turn, whose `text` says it all."""
    earlier: tuple[Branch, ...] = ()
    """Branches that a rewriting template closed; each sampled token stands in exactly one."""
    given: tuple[tuple[int, float], ...] = ()
    """Rewards that tools and environments gave on the way: turn and value."""
    notes: Mapping[str, float] = field(default_factory=dict[str, float])
    """Counters of the conversation, e.g. `drift` and `seconds`."""
    kept_mass: tuple[float | None, ...] = ()
    """Probability left by top-k, top-p and min-p where each was sampled; empty: they are off."""
    routes: ExpertRoutes | None = None
    """Experts that the sampler's routers chose for the first tokens; None: not recorded."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.sources), len(self.turns), len(self.logps)}
        lengths |= {len(self.kept_mass)} - {0}
        assert lengths == {len(self.versions)}, "streams of a rollout differ in length"
        if self.fault is not None:
            object.__setattr__(self, "fault", masked(self.fault))

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All token lists of the conversation, the last one at the end."""
        last = Branch(
            tokens=self.tokens,
            sources=self.sources,
            turns=self.turns,
            logps=self.logps,
            versions=self.versions,
            kept_mass=self.kept_mass,
            routes=self.routes,
        )
        return (*self.earlier, last)

    @property
    def num_turns(self) -> int:
        """Assistant turns in which something was sampled."""
        pairs = [p for part in self._parts for p in zip(part.sources, part.turns, strict=True)]
        return len({turn for source, turn in pairs if source == Source.SAMPLED})

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that the policy sampled."""
        return _before_sampled(self._parts[0])

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, tool results included; after the prompt of every branch."""
        return sum(len(part.tokens) - _before_sampled(part) for part in self._parts)

    @property
    def key(self) -> tuple[int, int, str, int]:
        """What rollouts are sorted by, so that the order of finishing never matters."""
        return self.group.step, self.group.draw, self.group.uid, self.sample

    @property
    def _parts(self) -> "tuple[Branch | Rollout, ...]":
        """`branches`, where only streams are read: a rollout has those of its last branch."""
        return (*self.earlier, self)


def _before_sampled(part: Branch | Rollout) -> int:
    sources, sampled = part.sources, Source.SAMPLED
    return sources.index(sampled) if sampled in sources else len(sources)


# Whether a value reaches a threshold; rounding errors do not decide.

_RELATIVE = 1e-6
"""Sums of single-precision numbers are that exact."""
_LEAST = 1e-12
"""Smallest tolerance, for a threshold of 0."""


def lowest(bar: float) -> float:
    """The least value that reaches a bar.

    Example:
        >>> lowest(2.0), lowest(-math.inf)
        (1.999998, -inf)
    """
    return bar - max(_RELATIVE * abs(bar), _LEAST) if math.isfinite(bar) else bar


def reaches(value: float, bar: float) -> bool:
    """Whether a value is at least the bar, up to a millionth of it.

    Every bar of a reward, a gate or a share of solved samples is compared in this way.

    Example:
        >>> 0.7 + 0.2 + 0.1 >= 1.0, reaches(0.7 + 0.2 + 0.1, 1.0), reaches(0.999, 1.0)
        (False, True, False)
    """
    return value >= lowest(bar)
