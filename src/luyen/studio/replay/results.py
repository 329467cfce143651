"""Results of a replay: numbers, digests and tokens side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from luyen.base.records import Rollout
from luyen.data.tokenizer import Tokenizer
from luyen.studio.replay.learner import LearnedStep, StepCheck, StepTrace
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.regenerate import RegeneratedRollout
from luyen.telemetry.manifest import collect

# Per-token comparison of a step under two configurations.

Streams: TypeAlias = dict[str, Tensor]
"""Numbers of every token of the step by name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """Loss terms of one token.

    Example:
        >>> TokenView(loss=2.0, weight=0.5, ratio=1.0, advantage=-2.0, gradient=1.0,
        ...           is_clipped=False).share
        1.0
    """

    loss: float
    """Its loss, terms of entropy and KL included."""
    weight: float
    """Its weight in the loss of its optimizer step."""
    ratio: float
    """Its importance ratio to the weights at the start of the update."""
    advantage: float
    """Its advantage."""
    gradient: float
    """Derivative of the step's loss by its log-probability, weight included."""
    is_clipped: bool
    """Whether the policy loss gives it no gradient in spite of its advantage."""

    @property
    def share(self) -> float:
        """What it adds to the loss of its optimizer step."""
        return self.loss * self.weight


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """One token in one epoch, under two configurations.

    Example:
        >>> one = TokenView(loss=1.0, weight=1.0, ratio=1.0, advantage=-1.0, gradient=1.0,
        ...                 is_clipped=False)
        >>> TokenChange(rollout="1.0.ab/0", branch=0, position=7, visit=0, id=5, text=" x",
        ...             before=one, after=one).moved
        0.0
    """

    rollout: str
    """Group and sample."""
    branch: int
    """Which of its token lists."""
    position: int
    """Place in the list."""
    visit: int
    """Index of the epoch over the batch."""
    id: int
    """The token."""
    text: str
    """The token as text."""
    before: TokenView
    """As the run had it."""
    after: TokenView
    """With the change."""

    @property
    def moved(self) -> float:
        """Absolute change of its contribution to the loss."""
        return abs(self.after.share - self.before.share)


def token_changes(
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer,
    one: tuple[LearnedStep, Sequence[StepTrace]],
    other: tuple[LearnedStep, Sequence[StepTrace]],
) -> list[TokenChange]:
    """Every token that both visited, the one that moved most first.

    `rollouts` are those of the batch, in its order. If the number of epochs differs, the epochs
    that both have are compared.
    """
    visits_a, visits_b = (_visits(learned, traces) for learned, traces in (one, other))
    places = _places(rollouts)
    found: list[TokenChange] = []
    for visit, (before, after) in enumerate(zip(visits_a, visits_b, strict=False)):
        seen = (before["seen"] & after["seen"]).nonzero().flatten().tolist()
        before, after = (_listed(streams) for streams in (before, after))
        for place in seen:
            rollout, branch, position, token = places[place]
            found.append(
                TokenChange(
                    rollout=rollout,
                    branch=branch,
                    position=position,
                    visit=visit,
                    id=token,
                    text=tokenizer.decode([token], skip_special=False),
                    before=_view(before, place),
                    after=_view(after, place),
                )
            )
    return sorted(found, key=lambda change: -change.moved)


def _visits(learned: LearnedStep, traces: Sequence[StepTrace]) -> list[Streams]:
    """Streams over the whole batch, one entry per epoch."""
    batch = learned.batch
    mask = batch.layout.mask
    counts = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    found: list[Streams] = []
    for trace in traces:
        place, explained = trace.place, trace.explained
        visit = int(counts[place[0]])
        counts[place] += 1
        if visit == len(found):
            blank = torch.zeros(mask.shape, device=mask.device)
            names = ("loss", "weight", "ratio", "gradient", "is_clipped", "seen")
            found.append({name: blank.clone() for name in names})
            found[visit]["advantage"] = batch.streams["advantages"]
        streams = found[visit]
        for name in ("loss", "weight", "ratio", "gradient", "is_clipped"):
            values: Tensor = getattr(explained, name)
            streams[name][place] = values.to(streams[name].dtype)
        streams["seen"][place] = mask[place].to(streams["seen"].dtype)
    return [{**streams, "seen": streams["seen"].bool()} for streams in found]


def _listed(streams: Streams) -> dict[str, list[float]]:
    return {name: stream.tolist() for name, stream in streams.items()}


def _places(rollouts: Sequence[Rollout]) -> list[tuple[str, int, int, int]]:
    """Rollout, branch, position and token of each place of the packed batch."""
    return [
        (f"{rollout.group}/{rollout.sample}", number, position, token)
        for rollout in rollouts
        for number, branch in enumerate(rollout.branches)
        for position, token in enumerate(branch.tokens)
    ]


def _view(streams: dict[str, list[float]], place: int) -> TokenView:
    return TokenView(
        loss=streams["loss"][place],
        weight=streams["weight"][place],
        ratio=streams["ratio"][place],
        advantage=streams["advantage"][place],
        gradient=streams["gradient"][place],
        is_clipped=bool(streams["is_clipped"][place]),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NumberPair:
    """A number of a step, before and after.

    Example:
        >>> NumberPair(before=0.5, after=0.5).is_equal, NumberPair(before=0.0, after=-0.0).is_equal
        (True, False)
    """

    before: float | None
    """As the run recorded it, or without the change; None: it has no such number."""
    after: float | None
    """As it came out again, or with the change; None: there is none."""

    @property
    def is_equal(self) -> bool:
        """Whether they are bit-identical."""
        return repr(self.before) == repr(self.after)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A replayed step compared with the record.

    Example:
        >>> ReplayedStep(run="runs/a/b", step=3, start="the beginning", notes=(), numbers={},
        ...     checks=(StepCheck(step=3, equal=("weights",), unequal=()),)).is_equal
        True
    """

    run: str
    """Folder of the run."""
    step: int
    """The step."""
    start: str
    """Where the replay started: a checkpoint or the beginning."""
    checks: tuple[StepCheck, ...]
    """Every replayed step, the wanted one last."""
    numbers: Mapping[str, NumberPair]
    """What the step measured, recorded and again."""
    notes: tuple[str, ...]
    """What could not be compared, and what may explain a difference."""

    @property
    def parting(self) -> StepCheck | None:
        """The first step that differs from the record."""
        return next((one for one in self.checks if one.unequal), None)

    @property
    def is_equal(self) -> bool:
        """Whether all digests and all recorded numbers match."""
        known = [number for number in self.numbers.values() if number.before is not None]
        return self.parting is None and all(number.is_equal for number in known)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepVariation:
    """A step as recorded and with changed keys, from the same weights.

    Example:
        >>> StepVariation(run="runs/a/b", step=3, start="the beginning", keys={}, checks=(),
        ...        numbers={}, tokens=(), stages=(), notes=()).tokens
        ()
    """

    run: str
    """Folder of the run."""
    step: int
    """The step."""
    start: str
    """Where the replay started: a checkpoint or the beginning."""
    checks: tuple[StepCheck, ...]
    """The steps replayed without the change, the wanted one last."""
    keys: Mapping[str, tuple[Any, Any]]
    """Changed keys with both values."""
    numbers: Mapping[str, NumberPair]
    """What the step measured, without and with the change."""
    tokens: tuple[TokenChange, ...]
    """Every token that both visited, the one whose part in the loss moved most first."""
    stages: tuple[str, ...]
    """Stages that the change acts on."""
    notes: tuple[str, ...]
    """What a reader should know."""

    @property
    def parting(self) -> StepCheck | None:
        """The first step that differs from the record without the change."""
        return next((one for one in self.checks if one.unequal), None)

    @property
    def is_equal(self) -> bool:
        """Whether the step without the change matches the record."""
        return self.parting is None


def as_json(found: ReplayedStep | StepVariation | RegeneratedRollout) -> dict[str, Any]:
    """Plain data, derived properties included."""
    page = {"equal": found.is_equal, **asdict(found)}
    if isinstance(found, RegeneratedRollout):
        return page
    parting = found.parting
    where = None if parting is None else {"step": parting.step, "stage": parting.parted_at}
    return {**page, "parting": where}


# Notes of a replay, and pairs of numbers.

_PARTED = "the weights before the step are not those of the run, so neither is what follows"


def paired(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, NumberPair]:
    """Pairs of all numbers of both sides by name."""
    names = sorted(before.keys() | after.keys())
    return {name: NumberPair(before=before.get(name), after=after.get(name)) for name in names}


def notes_on(record: ReplayRecord, step: int, checks: Sequence[StepCheck]) -> list[str]:
    """What could not be compared, and what may explain a difference."""
    notes: list[str] = []
    if step not in record.metrics:
        notes.append("metrics.jsonl does not have the step: numbers are compared with nothing")
    if any(one.unequal for one in checks[:-1]):
        notes.append(_PARTED)
    if any(one.unequal for one in checks):
        notes += _other_machine(record)
    return notes


def _other_machine(record: ReplayRecord) -> list[str]:
    """Differences of machine, packages and settings since the run began."""
    written = record.directory.read_manifest()
    here = collect(seeds={}, datasets={}).as_json()
    pairs = {
        f"{kind}.{name}": (written.get(kind, {}).get(name), here[kind].get(name))
        for kind, names in (
            ("versions", here["versions"]),
            ("settings", written.get("settings", {}).keys() | here["settings"].keys()),
            ("hardware", ("processor", "machine")),
        )
        for name in names
    }
    return [
        f"not as when the run began: {name} was {before}, is {now}"
        for name, (before, now) in sorted(pairs.items())
        if before != now
    ]
