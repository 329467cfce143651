"""What a replay found, as lines for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luyen.train.replay.rebuild import StepCheck
    from luyen.train.replay.regenerate import Drawn, Regenerated
    from luyen.train.replay.results import Number, Replayed, Varied
    from luyen.train.replay.tokens import TokenChange

_SHOWN = 8
"""Tokens and further numbers that are listed before the rest is counted."""
_FIRST = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/ref_kl",
    "actor/kl_loss",
    "actor/entropy",
    "critic/vf_loss",
    "critic/grad_norm",
    "advantage/mean_abs",
    "advantage/min",
    "advantage/max",
)
"""Numbers that are always shown, where the step has them."""


def replay_lines(found: "Replayed | Varied | Regenerated") -> Iterator[str]:
    """The outcome of any replay."""
    from luyen.train.replay.regenerate import Regenerated
    from luyen.train.replay.results import Varied

    if isinstance(found, Regenerated):
        yield from _regenerated(found)
    elif isinstance(found, Varied):
        yield from _varied(found)
    else:
        yield from _replayed(found)


def _replayed(found: "Replayed") -> Iterator[str]:
    yield from _heading(found.run, found.step, found.start, len(found.checks))
    yield from _verdict(found.checks)
    yield ""
    yield from _numbers(found.numbers, ("recorded", "again"))
    yield from _notes(found.notes)


def _varied(found: "Varied") -> Iterator[str]:
    yield from _heading(found.run, found.step, found.start, len(found.checks))
    for key, (before, after) in found.keys.items():
        yield f"  {key}: {_value(before)} -> {_value(after)}"
    yield from _verdict(found.checks)
    changed = ", ".join(found.stages)
    yield f"The change acts on its {changed}." if changed else "The change acts on nothing."
    yield ""
    yield from _numbers(found.numbers, ("as it was", "changed"))
    moved = [token for token in found.tokens if token.before != token.after]
    if moved:
        yield ""
        newly = sum(token.after.is_clipped > token.before.is_clipped for token in moved)
        freed = sum(token.after.is_clipped < token.before.is_clipped for token in moved)
        yield f"{len(moved)} tokens changed: {newly} newly clipped, {freed} no longer."
        yield "Those whose part in the loss moved most:"
        for token in moved[:_SHOWN]:
            yield from _token(token)
    yield from _notes(found.notes)


def _regenerated(found: "Regenerated") -> Iterator[str]:
    turns = f"{found.turns} turn{'' if found.turns == 1 else 's'}"
    yield f"{found.rollout}: {len(found.tokens)} sampled tokens in {turns}, drawn again"
    place = found.difference
    if place is None:
        yield "Every token came again, its log-probability to the last bit."
    else:
        same = sum(token.is_equal for token in found.tokens)
        yield f"First difference: token {place.position} (branch {place.branch}, turn {place.turn})"
        yield f"  recorded  {_drawn(place.recorded)}"
        yield f"  again     {_drawn(place.drawn)}"
        yield f"{same} of {len(found.tokens)} tokens came again with the same log-probability."
    yield from _notes(found.notes)


def _heading(run: str, step: int, start: str, count: int) -> Iterator[str]:
    before = f" and {count - 1} recorded step{'' if count == 2 else 's'}" if count > 1 else ""
    yield f"{run}, step {step}, from {start}{before}"


def _verdict(checks: Sequence["StepCheck"]) -> Iterator[str]:
    parting = next((one for one in checks if one.unequal), None)
    if parting is None:
        last = checks[-1]
        yield f"As in the run, to the last bit: {', '.join(last.equal) or 'nothing is recorded'}."
        return
    yield f"It parts from the run at step {parting.step}, in its {parting.parted_at}."
    yield f"  equal: {', '.join(parting.equal) or 'none'}"
    yield f"  different: {', '.join(parting.unequal)}"


def _numbers(numbers: Mapping[str, "Number"], heads: tuple[str, str]) -> Iterator[str]:
    """The numbers that are always shown, and those that differ."""
    first = [name for name in _FIRST if name in numbers]
    others = [n for n, number in numbers.items() if n not in first and not number.is_equal]
    rows = [(n, _value(numbers[n].before), _value(numbers[n].after)) for n in first + others]
    rows = rows[: len(first) + _SHOWN]
    width = max(len(name) for name, _, _ in rows)
    middle = max(len(heads[0]), *(len(before) for _, before, _ in rows))
    yield f"{'':{width}s}  {heads[0]:{middle}s}  {heads[1]}"
    for name, before, after in rows:
        same = "=" if before == after else after
        yield f"{name:{width}s}  {before:{middle}s}  {same}"
    if len(others) > _SHOWN:
        yield f"... and {len(others) - _SHOWN} more that differ (--json lists all)"


def _token(token: "TokenChange") -> Iterator[str]:
    branch = f", branch {token.branch}" if token.branch else ""
    visit = f", visit {token.visit + 1}" if token.visit else ""
    yield f"  {token.rollout} token {token.position}{branch}{visit} {token.text!r}"
    one, other = token.before, token.after
    words = [
        _moved("loss", one.loss, other.loss),
        _moved("weight", one.weight, other.weight),
        _moved("ratio", one.ratio, other.ratio),
        _moved("advantage", one.advantage, other.advantage),
        _moved("gradient", one.gradient, other.gradient),
        _moved("clipped", one.is_clipped, other.is_clipped),
    ]
    yield f"    {'  '.join(words)}"


def _moved(name: str, before: float, after: float) -> str:
    """A value, or how it changed.

    Example:
        >>> _moved("loss", 0.5, 0.25), _moved("clipped", False, True), _moved("ratio", 1.0, 1.0)
        ('loss 0.5 -> 0.25', 'clipped no -> yes', 'ratio 1')
    """
    if before == after:
        return f"{name} {_short(before)}"
    return f"{name} {_short(before)} -> {_short(after)}"


def _short(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}"


def _value(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else repr(value)


def _drawn(drawn: "Drawn | None") -> str:
    if drawn is None:
        return "nothing: the turn had ended"
    return f"id {drawn.id} {drawn.text!r}, logp {drawn.logp!r}"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield f"note: {note}"
