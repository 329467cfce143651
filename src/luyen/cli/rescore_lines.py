"""What judging anew showed, as lines for people."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from luyen.rewards.objectives import Objectives
    from luyen.train.rescore.ranks import RankChange
    from luyen.train.rescore.results import Component, Moved, Rescored

_CONFLICT = -0.1
"""Correlation of two components below which one is bought with the other."""
_ROUNDING = 1e-9
_LONGEST = 100
"""Characters of a question or an answer that are shown."""


def rescore_lines(found: "Rescored", *, shown: int) -> Iterator[str]:
    """The outcome, part by part."""
    steps = found.steps
    which = (
        f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    )
    yield f"{found.run}, {which}: {found.count} rollouts of {len(found.new)} groups judged anew"
    if found.broken:
        yield f"{found.broken} rollouts broke before anyone could judge them, and are left out"
    yield from _faults(found)
    yield ""
    yield from _means(found.components())
    yield ""
    yield from _orders(found)
    before, after = found.objectives()
    yield from _trade_offs("in the run", before)
    yield from _trade_offs("now", after)
    moved = found.moved()[:shown]
    if moved:
        yield ""
        yield "Moved most among their siblings:"
        for one in moved:
            yield from _one_moved(one)


def mean_tau(changes: "Sequence[RankChange]") -> float | None:
    """Mean of Kendall's tau over the groups that have one."""
    known = [change.tau for change in changes if change.tau is not None]
    return fmean(known) if known else None


def question_of(one: "Moved") -> str:
    """The last message that the rollout answers."""
    messages = one.both.prompt.messages
    return str(messages[-1].get("content") or "") if messages else ""


def _faults(found: "Rescored") -> Iterator[str]:
    lost = found.faults
    if lost:
        first = lost[0]
        yield f"{len(lost)} of {found.count} could not be judged and have no reward; the first:"
        yield f"  {first.group}/{first.sample}: {_short(first.fault or '')}"


def _means(components: "Sequence[Component]") -> Iterator[str]:
    width = max(len("mean"), *(len(c.name) for c in components)) if components else len("mean")
    yield f"{'mean':{width}s}  {'in the run':>10s}  {'now':>10s}"
    for c in components:
        told = [
            f"{n} faults {when}" for n, when in ((c.old_faults, "then"), (c.new_faults, "now")) if n
        ]
        rest = f"  ({', '.join(told)})" if told else ""
        yield f"{c.name:{width}s}  {_number(c.old):>10s}  {_number(c.new):>10s}{rest}"


def _orders(found: "Rescored") -> Iterator[str]:
    changes = [change for _, change in found.changes()]
    told = [change.tau for change in changes if change.tau is not None]
    if not changes:
        yield "No group has two rollouts with both rewards: there is no order to compare."
    elif not told:
        yield f"Order: no group of {len(changes)} is told apart by both rewards."
    else:
        same = sum(tau > 1 - _ROUNDING for tau in told)
        yield (
            f"Order: Kendall's tau {fmean(told):.3f}, mean of {len(told)} groups that both rewards "
            f"tell apart; {same} keep their order"
        )
    if changes:
        others = sum(change.has_other_best for change in changes)
        yield f"Another best rollout: {others} of {len(changes)} groups"
    both = found.correlation()
    if both is not None:
        yield f"Correlation of the two rewards over all rollouts: {both:.3f}"


def _trade_offs(when: str, found: "Objectives") -> Iterator[str]:
    if len(found.means) < 2:
        return
    yield ""
    front = "" if found.front is None else f": {found.front:.1%} of a group on its Pareto front"
    yield f"Components {when}{front}"
    for (one, other), value in sorted(found.with_other.items(), key=lambda pair: pair[1]):
        words = "  conflict" if value < _CONFLICT else ""
        yield f"  {one} and {other}: correlation {value:.3f}{words}"


def _one_moved(one: "Moved") -> Iterator[str]:
    rollout = one.both.rollout
    way = "down" if one.places > 0 else "up"
    yield (
        f"  {rollout.group}/{rollout.sample}: {abs(one.places):g} of {one.of} places {way}, "
        f"reward {one.both.old:.4g} -> {one.both.new:.4g}"
    )
    yield f"    {_short(question_of(one))}"
    yield f"    {_short(rollout.text)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 3] + "..."
