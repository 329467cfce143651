"""Where the rollouts of two runs first differ: draw, rollout, token, call, part of a reward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.calls import ToolCall
from luyen.base.records import Branch, Rollout, Score
from luyen.telemetry.rollout_files import RecordedRollout

_SHOWN = 200
"""Letters of a text or a result that are shown."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first place in which the rollouts of a step differ.

    Example:
        >>> Found(rollout="1.0.ab/3", what="token", place="14", a={"id": 5}, b={"id": 6}).place
        '14'
    """

    rollout: str
    """Group and sample, `step.draw.uid/sample`; for prompts, the draw."""
    what: str
    """`prompt`, `rollout`, `token`, `stop`, `text`, `call`, `reward`, `given` or `advantage`."""
    place: str | None
    """Index of the token or the call, path of the part of the reward; None for the whole."""
    a: Any
    """What the first run has there; None: nothing."""
    b: Any
    """What the second run has there; None: nothing."""


def first_difference(
    a: Sequence[RecordedRollout], b: Sequence[RecordedRollout], stage: str
) -> Found | None:
    """The first difference that belongs to a stage, in the order of draws, samples and tokens."""
    if stage == "prompts":
        return _prompts(a, b)
    ones, others = _by_name(a), _by_name(b)
    for name in sorted(
        ones.keys() | others.keys(), key=lambda n: (ones.get(n) or others[n]).rollout.key
    ):
        one, other = ones.get(name), others.get(name)
        if one is None or other is None:
            said = [None if r is None else _shown(r.rollout.text) for r in (one, other)]
            return Found(rollout=name, what="rollout", place=None, a=said[0], b=said[1])
        found = next(_between(name, one, other, stage), None)
        if found is not None:
            return found
    return None


def _prompts(a: Sequence[RecordedRollout], b: Sequence[RecordedRollout]) -> Found | None:
    ones, others = ({r.rollout.group.draw: r.rollout.group.uid for r in rows} for rows in (a, b))
    for draw in sorted(ones.keys() | others.keys()):
        if ones.get(draw) != others.get(draw):
            one, other = ones.get(draw), others.get(draw)
            return Found(rollout=f"draw {draw}", what="prompt", place=None, a=one, b=other)
    return None


def _by_name(rows: Sequence[RecordedRollout]) -> dict[str, RecordedRollout]:
    return {f"{r.rollout.group}/{r.rollout.sample}": r for r in rows}


def _between(
    name: str, one: RecordedRollout, other: RecordedRollout, stage: str
) -> Iterator[Found]:
    """The differences of one rollout in two runs that belong to a stage."""
    if stage == "rollouts":
        found = _drawn(one.rollout, other.rollout)
    elif stage == "rewards":
        found = _judged(one.rollout, other.rollout)
    else:
        found = _credited(one, other)
    for what, place, a, b in found:
        yield Found(rollout=name, what=what, place=place, a=a, b=b)


def _drawn(one: Rollout, other: Rollout) -> Iterator[tuple[str, str | None, Any, Any]]:
    many = len(one.branches) > 1 or len(other.branches) > 1
    for number in range(max(len(one.branches), len(other.branches))):
        pair = [r.branches[number] if number < len(r.branches) else None for r in (one, other)]
        ones, others = (_tokens(branch) for branch in pair)
        for index, a, b in _unequal(ones, others):
            yield "token", f"{number}:{index}" if many else str(index), a, b
    for index, a, b in _unequal([_call(c) for c in one.calls], [_call(c) for c in other.calls]):
        yield "call", str(index), a, b
    if one.stop != other.stop:
        yield "stop", None, one.stop.value, other.stop.value
    if one.text != other.text:
        yield "text", None, _shown(one.text), _shown(other.text)
    if (one.fault is None) != (other.fault is None):
        yield "fault", None, one.fault, other.fault


def _tokens(branch: Branch | None) -> list[dict[str, Any]]:
    if branch is None:
        return []
    streams = zip(
        branch.tokens, branch.sources, branch.turns, branch.logps, branch.versions, strict=True
    )
    return [
        {"id": t, "source": s.name.lower(), "turn": turn, "logp": logp, "version": version}
        for t, s, turn, logp, version in streams
    ]


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "turn": call.turn,
        "name": call.name,
        "arguments": dict(call.arguments),
        "status": call.status.value,
        "result": call.result,
        "reward": call.reward,
    }


def _judged(one: Rollout, other: Rollout) -> Iterator[tuple[str, str | None, Any, Any]]:
    """Parts before the whole: the part is why the whole differs."""
    ones, others = (_parts(r.score) for r in (one, other))
    paths = sorted(dict.fromkeys([*ones, *others]), key=lambda path: -path.count("/"))
    for path in paths:
        if not _same(ones.get(path), others.get(path)):
            yield "reward", path, ones.get(path), others.get(path)
    if one.given != other.given:
        yield "given", None, one.given, other.given


def _parts(score: Score | None, prefix: str = "") -> dict[str, Any]:
    if score is None:
        return {}
    path = f"{prefix}{score.name}"
    own: dict[str, Any] = {"value": score.value, "weight": score.weight, "by_turn": score.by_turn}
    if score.raw is not None or score.gated:
        own |= {"raw": score.raw, "gated": score.gated}
    found: dict[str, Any] = {path: own}
    for part in score.parts:
        found |= _parts(part, f"{path}/")
    return found


def _credited(
    one: RecordedRollout, other: RecordedRollout
) -> Iterator[tuple[str, str | None, Any, Any]]:
    if (one.advantages is None) != (other.advantages is None):
        used = [None if r.advantages is None else "used in the step" for r in (one, other)]
        yield "advantage", None, used[0], used[1]
        return
    # Equal rollouts have equally many branches, and the rollouts are compared before credit is.
    rows = zip(
        (*one.earlier, one.advantages or ()), (*other.earlier, other.advantages or ()), strict=False
    )
    for number, (a, b) in enumerate(rows):
        for index, x, y in _unequal(a, b):
            yield "advantage", f"{number}:{index}" if one.earlier else str(index), x, y


def _unequal(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    for index in range(max(len(a), len(b))):
        x = a[index] if index < len(a) else None
        y = b[index] if index < len(b) else None
        if not _same(x, y):
            yield index, x, y


def _same(a: Any, b: Any) -> bool:
    """Equality by what is written: NaN is itself, and 0.0 is not -0.0."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return repr(a) == repr(b) if isinstance(a, float) or isinstance(b, float) else a == b


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
