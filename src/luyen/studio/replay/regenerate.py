"""Regenerate a recorded rollout turn by turn with the weights that sampled it.

Each turn is generated from the recorded tokens before it. These include the output of tools,
environments and templates, so none of them is run: as long as turns are equal, they would get the
same calls again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Source, StopReason
from luyen.data.tokenizer import Tokenizer
from luyen.rollout.protocol import Completion, Request, Sampling, generate
from luyen.rollout.single_turn import sampling_key
from luyen.studio.replay.learner import ReplayLearner
from luyen.studio.replay.record import RecordedStep
from luyen.train.builders.roles import training_sampling

# The turns of a recorded rollout as generation requests.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """The sampled tokens of one turn with their context.

    Example:
        >>> turn = RecordedTurn(branch=0, turn=1, before=(1, 2), tokens=(3,), logps=(-0.5,), room=8)
        >>> len(turn.before)
        2
    """

    branch: int
    """Which token list of the rollout."""
    turn: int
    """The assistant's turn."""
    before: tuple[int, ...]
    """The context of the policy."""
    tokens: tuple[int, ...]
    """The sampled tokens."""
    logps: tuple[float, ...]
    """Their log-probabilities."""
    room: int
    """Token budget of the turn."""


def turns_of(rollout: Rollout, *, max_response_length: int) -> Iterator[RecordedTurn]:
    """The turns in order; a turn without a sampled token is none."""
    opening, sampled = rollout.prompt_length, 0
    for number, branch in enumerate(rollout.branches):
        own = [i for i, source in enumerate(branch.sources) if source == Source.SAMPLED]
        for turn in dict.fromkeys(branch.turns[i] for i in own):
            places = [i for i in own if branch.turns[i] == turn]
            begin, end = places[0], places[-1] + 1
            logps = branch.logps[begin:end]
            room = min(opening + max_response_length - begin, max_response_length - sampled)
            sampled += len(places)
            yield RecordedTurn(
                branch=number,
                turn=turn,
                before=branch.tokens[:begin],
                tokens=branch.tokens[begin:end],
                logps=tuple(logp for logp in logps if logp is not None),
                room=room,
            )


_CUT = (StopReason.TIME_BUDGET, StopReason.ABORTED, StopReason.FAULT)
"""Endings that do not follow from the tokens: such a turn may have been longer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A sampled token with its log-probability.

    Example:
        >>> SampledToken(id=5, text=" x", logp=-0.5).text
        ' x'
    """

    id: int
    """The token."""
    text: str
    """The token as text."""
    logp: float
    """Its log-probability."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledToken:
    """A position of the rollout, as recorded and as regenerated.

    Example:
        >>> one = SampledToken(id=5, text=" x", logp=-0.5)
        >>> ResampledToken(branch=0, turn=0, position=9, recorded=one, regenerated=one).is_equal
        True
    """

    branch: int
    """Which token list of the rollout."""
    turn: int
    """The assistant's turn."""
    position: int
    """Place in the list."""
    recorded: SampledToken | None
    """The token of the run; None: its turn had ended."""
    regenerated: SampledToken | None
    """The regenerated token; None: the turn had ended."""

    @property
    def is_equal(self) -> bool:
        """Whether token and log-probability are bit-identical."""
        return self.recorded == self.regenerated


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RegeneratedRollout:
    """A rollout and its repetition.

    Example:
        >>> RegeneratedRollout(rollout="1.0.ab/0", turns=1, tokens=(), notes=()).is_equal
        True
    """

    rollout: str
    """Group and sample."""
    turns: int
    """Regenerated turns."""
    tokens: tuple[ResampledToken, ...]
    """Every sampled token, in order."""
    notes: tuple[str, ...]
    """What a reader should know."""

    @property
    def difference(self) -> ResampledToken | None:
        """The first place that is not the same."""
        return next((token for token in self.tokens if not token.is_equal), None)

    @property
    def is_equal(self) -> bool:
        """Whether every token is equal."""
        return self.difference is None


def find_rollout(recorded: RecordedStep, wanted: str) -> Rollout:
    """The rollout whose `step.draw.uid/sample` begins with `wanted`; a UserError unless unique."""
    named = {f"{r.group}/{r.sample}": r for r in recorded.rollouts if r.fault is None}
    named = {f"{r.group}/{r.sample}": r for r in recorded.rollouts} | named
    found = [wanted] if wanted in named else [name for name in named if name.startswith(wanted)]
    if len(found) == 1:
        return named[found[0]]
    some = found or list(named)
    what = "several begin so" if found else f"step {recorded.step} has no such rollout"
    listed = ", ".join(some[:4]) + (f", ... ({len(some)})" if len(some) > 4 else "")
    raise UserError("--rollout", wanted, f"{what}: {listed}", "give one of them")


def regenerate(run: ReplayLearner, rollout: Rollout) -> RegeneratedRollout:
    """Generate a recorded rollout again with the current weights of `run`."""
    name = f"{rollout.group}/{rollout.sample}"
    _refuse_other_versions(run, rollout, name)
    most = run.config.data.max_response_length
    turns = list(turns_of(rollout, max_response_length=most))
    if not turns:
        why = "nothing was sampled in it"
        raise UserError("--rollout", name, f"{why} ({rollout.stop.value})", "give another")
    sampling = training_sampling(run.config, run.tokenizer)
    completions = _regenerated(run, rollout, turns, sampling)
    tokens: list[ResampledToken] = []
    notes: list[str] = []
    for turn, again in zip(turns, completions, strict=True):
        is_cut = turn is turns[-1] and rollout.stop in _CUT
        if is_cut and len(again.tokens) > len(turn.tokens):
            notes.append(f"the record of its last turn was cut ({rollout.stop.value})")
        tokens += _compared(turn, again, run.tokenizer, is_cut=is_cut)
    return RegeneratedRollout(
        rollout=name, turns=len(turns), tokens=tuple(tokens), notes=tuple(notes)
    )


def _regenerated(
    run: ReplayLearner, rollout: Rollout, turns: Sequence[RecordedTurn], sampling: Sampling
) -> list[Completion]:
    """Completions of all turns, each with its context and its own random numbers."""
    requests = [
        Request(
            id=f"turn {turn.turn}",
            tokens=turn.before,
            keys=(
                sampling_key(
                    run.config.trainer.seed, "rollout", rollout.group, rollout.sample, turn.turn
                ),
            ),
            sampling=replace(sampling, max_new_tokens=turn.room),
        )
        for turn in turns
    ]
    found = generate(run.engine, requests)
    return [found[request.id, 0] for request in requests]


def _compared(
    turn: RecordedTurn, again: Completion, tokenizer: Tokenizer, *, is_cut: bool
) -> Iterator[ResampledToken]:
    def at(index: int, tokens: Sequence[int], logps: Sequence[float]) -> SampledToken | None:
        if index >= len(tokens):
            return None
        text = tokenizer.decode([tokens[index]], skip_special=False)
        return SampledToken(id=tokens[index], text=text, logp=logps[index])

    longest = max(len(turn.tokens), len(again.tokens))
    for index in range(len(turn.tokens) if is_cut else longest):
        yield ResampledToken(
            branch=turn.branch,
            turn=turn.turn,
            position=len(turn.before) + index,
            recorded=at(index, turn.tokens, turn.logps),
            regenerated=at(index, again.tokens, again.logps),
        )


def step_of_weights(rollout: Rollout, step: int) -> int:
    """The step that began with the weights that sampled a rollout; a UserError if several did."""
    versions = {v for branch in rollout.branches for v in branch.versions if v is not None}
    if len(versions) > 1:
        name, several = f"{rollout.group}/{rollout.sample}", ", ".join(map(str, sorted(versions)))
        why = f"versions {several} of the weights drew it, one after the other"
        fix = "give one that a single version drew; trainer.async_order=submission makes only such"
        raise UserError("--rollout", name, why, fix)
    return versions.pop() + 1 if versions else step


def _refuse_other_versions(run: ReplayLearner, rollout: Rollout, name: str) -> None:
    versions = {v for branch in rollout.branches for v in branch.versions if v is not None}
    progress = run.progress
    other = sorted(versions - {progress.version})
    if other:
        why = f"version {other[0]} of the weights drew it, and version {progress.version} stands "
        why += f"before step {progress.step + 1}"
        raise UserError("--rollout", name, why, f"replay it with --step {other[0] + 1}")
