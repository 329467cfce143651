"""Sections of curves: learning, parts of the reward, parity, and where the time goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.studio.doctor.read import RunRecord
from luyen.studio.report.chart import Line, line_chart, stack_chart
from luyen.studio.report.markup import Html, element, joined, missing
from luyen.telemetry.display import PHASES
from luyen.telemetry.metrics_file import series

_MOST_LINES = 6
_PHASES = (*PHASES, "digest", "validate", "save")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A picture: metrics that belong together.

    Example:
        >>> Curve(title="Entropy", names=("actor/entropy",)).names
        ('actor/entropy',)
    """

    title: str
    """Heading."""
    names: tuple[str, ...]
    """Metrics; one that ends with `*` stands for all that begin so."""


CURVES = (
    Curve(title="Reward", names=("reward/mean",)),
    Curve(
        title="Validation",
        names=(
            "val/accuracy",
            "val/reward/mean@*",
            "sft/val_nll",
            "preference/val_accuracy",
            "reward_model/val_accuracy",
            "distill/val_divergence",
        ),
    ),
    Curve(
        title="Loss",
        names=(
            "actor/pg_loss",
            "actor/loss",
            "sft/nll",
            "preference/loss",
            "reward_model/loss",
            "distill/divergence",
        ),
    ),
    Curve(title="Preferences", names=("preference/accuracy", "reward_model/accuracy")),
    Curve(
        title="Implicit rewards", names=("preference/chosen_reward", "preference/rejected_reward")
    ),
    Curve(title="Value loss", names=("critic/vf_loss",)),
    Curve(title="KL to the reference", names=("actor/ref_kl", "actor/kl_loss")),
    Curve(title="KL of the update (old to new policy)", names=("actor/ppo_kl",)),
    Curve(title="Share of conversations that call a tool", names=("tools/call_fraction",)),
    Curve(title="Reverse KL to the teacher", names=("distill/reverse_kl",)),
    Curve(title="Entropy", names=("actor/entropy",)),
    Curve(title="Gradient norm", names=("actor/grad_norm", "critic/grad_norm", "sft/grad_norm")),
    Curve(title="Learning rate", names=("actor/lr", "critic/lr", "sft/lr")),
    Curve(
        title="Lengths", names=("response_length/mean", "response_length/max", "prompt_length/mean")
    ),
    Curve(title="Tokens a second", names=("time/tokens_per_s",)),
)


def curves_section(record: RunRecord) -> Html:
    """The curves of learning; those that the run has no numbers for are named."""
    charts: list[Html] = []
    absent: list[str] = []
    for curve in CURVES:
        lines = lines_of(record, curve.names)
        if lines:
            charts.append(line_chart(curve.title, lines))
        else:
            absent.append(curve.title)
    return joined(
        element("div", *charts, class_="charts") if charts else None,
        missing(f"Not measured in this run: {', '.join(absent)}.") if absent else None,
    )


def rewards_section(record: RunRecord) -> Html:
    """The parts of the reward over time."""
    names = [
        name
        for name in record.names()
        if name.startswith("reward/") and name.endswith("/mean") and name != "reward/mean"
    ]
    spread = lines_of(record, ("reward/min", "reward/mean", "reward/max"))
    charts = [
        line_chart("Parts of the reward", lines_of(record, names[i : i + _MOST_LINES]))
        for i in range(0, len(names), _MOST_LINES)
    ]
    charts += [line_chart("Lowest, mean and highest reward", spread)] if spread else []
    groups = lines_of(record, ("group/zero_std_fraction", "group/solve_all_fraction"))
    charts += [line_chart("Groups that teach nothing", groups)] if groups else []
    if not charts:
        return missing("The run has no rewards: it was supervised, or has not done a step.")
    return element("div", *charts, class_="charts")


def parity_section(record: RunRecord) -> Html:
    """The gap between the sampler's and the trainer's log-probabilities."""
    names = [name for name in record.names() if name.startswith("parity/")]
    shares = [name for name in names if name.endswith(("_fraction", "_share"))]
    gaps = [name for name in names if name not in shares]
    charts = [
        line_chart(title, lines_of(record, some[i : i + _MOST_LINES]))
        for title, some in (("Gap of log-probabilities", gaps), ("Shares of tokens", shares))
        for i in range(0, len(some), _MOST_LINES)
    ]
    if not charts:
        return missing("The run did not measure the gap between sampler and trainer.")
    finite = Line(label="", points=_points(record, "parity/max_gap")).finite
    largest = max((value for _, value in finite), default=None)
    words = f"Largest gap of any step: {largest:.3g}." if largest is not None else None
    return joined(element("p", words) if words else None, element("div", *charts, class_="charts"))


def timing_section(record: RunRecord) -> Html:
    """Seconds of each phase, on top of one another, and their shares."""
    lines = [
        Line(label=phase, points=points)
        for phase in _PHASES
        if (points := _points(record, f"time/{phase}"))
    ]
    if not lines:
        return missing("The run wrote no times.")
    longest = max(lines, key=lambda line: len(line.points))
    order = [longest, *(line for line in lines if line is not longest)]
    sums = {line.label: sum(value for _, value in line.finite) for line in lines}
    whole = sum(sums.values()) or 1.0
    shares = [
        element("li", f"{name}: {seconds:,.1f} s, {seconds / whole:.0%}")
        for name, seconds in sorted(sums.items(), key=lambda pair: -pair[1])
    ]
    chart = stack_chart("Seconds of a step by phase", order)
    return joined(element("div", chart, class_="charts"), element("ul", *shares))


def lines_of(record: RunRecord, names: Sequence[str]) -> list[Line]:
    """The metrics among these that the run has, at most as many as there are colours."""
    known = {name for line in record.lines for name in line.values}
    found: list[str] = []
    for name in names:
        begins = name.removesuffix("*")
        found += sorted(n for n in known if n == name or (begins != name and n.startswith(begins)))
    kept = list(dict.fromkeys(found))[:_MOST_LINES]
    return [Line(label=name, points=_points(record, name)) for name in kept]


def _points(record: RunRecord, name: str) -> tuple[tuple[int, float], ...]:
    steps, values = series(list(record.lines), name)
    return tuple(zip(steps, values, strict=True))
