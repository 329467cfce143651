"""Sections of curves as SVG: learning, parts of the reward, parity, time per phase."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.studio.doctor.record import RunRecord
from luyen.studio.report.html import COLOURS, Html, element, joined, missing, number
from luyen.telemetry.display import PHASES
from luyen.telemetry.metrics import series

# Geometry of charts: scales, round ticks, thinned points, running means.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A straight map from values to pixels.

    Example:
        >>> Scale(low=0.0, high=2.0, start=10.0, end=110.0)(1.0)
        60.0
    """

    low: float
    """Value at `start`."""
    high: float
    """Value at `end`."""
    start: float
    """First pixel."""
    end: float
    """Last pixel."""

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest finite value with some room; never of width 0.

    Example:
        >>> value_range([1.0, 1.0])
        (0.5, 1.5)
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low)
    if room == 0.0 or not math.isfinite(room):
        room = 0.5 * abs(low) if low else 0.5
    return low - room, high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values between two ends, about `count` of them.

    Example:
        >>> ticks(0.0, 1.0, 4)
        [0.0, 0.5, 1.0]
    """
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points: the minimum and the maximum of each bin, so that no peak is lost.

    Example:
        >>> thinned([(1, 0.0), (2, 9.0), (3, 1.0), (4, 1.0)], 4)
        [(1, 0.0), (2, 9.0), (3, 1.0), (4, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[tuple[int, float]] = []
    for i in range(stretches):
        stretch = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, up to `window`.

    Example:
        >>> running_mean([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    means: list[float] = []
    for end in range(1, len(values) + 1):
        near = values[max(0, end - window) : end]
        means.append(math.fsum(near) / len(near))
    return means


# Charts of metrics over the steps as SVG: lines or stacked areas.

WIDTH, HEIGHT = 520, 210
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 26
MOST_POINTS, MOST_TITLES = 600, 150
_SMOOTH_FROM = 40
"""Points from which on a line is drawn pale, with its running mean over it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One metric over the steps.

    Example:
        >>> ChartLine(label="reward/mean", points=((1, 0.5), (2, float("nan")))).finite
        [(1, 0.5)]
    """

    label: str
    """Its name."""
    points: tuple[tuple[int, float], ...]
    """Step and value, in order."""

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The points with finite values."""
        return [point for point in self.points if math.isfinite(point[1])]


def line_chart(title: str, lines: Sequence[ChartLine]) -> Html:
    """A figure with the lines, a legend, and the numbers of a step under the pointer."""
    x, y = _axes(lines, value_range([v for line in lines for _, v in line.points]))
    parts = [*_grid(x, y)]
    for i, line in enumerate(lines):
        parts += _line_marks(line, x, y, f"l{i % COLOURS}")
    parts += _titles(lines, x)
    return _figure(title, lines, parts)


def stack_chart(title: str, lines: Sequence[ChartLine]) -> Html:
    """A figure with stacked areas; a missing step counts as 0."""
    steps = [step for step, _ in lines[0].points]
    sums = [0.0] * len(steps)
    layers: list[tuple[list[float], list[float]]] = []
    for line in lines:
        at = dict(line.finite)
        above = [low + at.get(step, 0.0) for low, step in zip(sums, steps, strict=True)]
        layers.append((sums, above))
        sums = above
    x, y = _axes(lines, (0.0, 1.06 * max([*sums, 1e-9])))
    parts = [*_grid(x, y)]
    kept = {step for step, _ in thinned(list(zip(steps, sums, strict=True)), MOST_POINTS)}
    for i, (low, high) in enumerate(layers):
        places = [j for j, step in enumerate(steps) if step in kept]
        top = [_place(x(steps[j]), y(high[j])) for j in places]
        bottom = [_place(x(steps[j]), y(low[j])) for j in reversed(places)]
        parts.append(element("polygon", points=" ".join(top + bottom), class_=f"a{i % COLOURS}"))
    parts += _titles(lines, x)
    return _figure(title, lines, parts)


def _axes(lines: Sequence[ChartLine], values: tuple[float, float]) -> tuple[Scale, Scale]:
    steps = [step for line in lines for step, _ in line.points]
    first, last = min(steps), max(steps)
    first, last = (first - 1, last + 1) if first == last else (first, last)
    x = Scale(low=first, high=last, start=LEFT, end=WIDTH - RIGHT)
    return x, Scale(low=values[0], high=values[1], start=HEIGHT - BOTTOM, end=TOP)


def _grid(x: Scale, y: Scale) -> list[Html]:
    parts: list[Html] = []
    for value in ticks(y.low, y.high, 4):
        place = f"{y(value):.1f}"
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place, class_="rule"))
        words = number(value)
        parts.append(element("text", words, x=LEFT - 6, y=f"{y(value) + 4:.1f}", text_anchor="end"))
    for value in ticks(x.low, x.high, 6):
        if value == int(value):
            place = f"{x(value):.1f}"
            parts.append(element("text", int(value), x=place, y=HEIGHT - 8, text_anchor="middle"))
    return parts


def _line_marks(line: ChartLine, x: Scale, y: Scale, colour: str) -> list[Html]:
    points = line.finite
    parts: list[Html] = []
    is_long = len(points) >= _SMOOTH_FROM
    kind = f"{colour} pale" if is_long else colour
    parts.append(_polyline(thinned(points, MOST_POINTS), x, y, kind))
    if is_long:
        means = running_mean([value for _, value in points], max(3, len(points) // 15))
        smooth = [(step, mean) for (step, _), mean in zip(points, means, strict=True)]
        parts.append(_polyline(smooth[:: max(1, len(smooth) // MOST_POINTS)], x, y, colour))
    else:
        parts += [
            element("circle", cx=f"{x(s):.1f}", cy=f"{y(v):.1f}", r=2.5, class_=f"d{colour[1]}")
            for s, v in points
        ]
    odd = [(step, value) for step, value in line.points if not math.isfinite(value)]
    for step, value in odd[:MOST_TITLES]:
        title = element("title", f"step {step}: {line.label} {value}")
        mark = {"x": f"{x(step):.1f}", "y": HEIGHT - BOTTOM - 2}
        parts.append(element("text", "\u2715", title, class_="odd", text_anchor="middle", **mark))
    return parts


def _polyline(points: Sequence[tuple[int, float]], x: Scale, y: Scale, kind: str) -> Html:
    places = " ".join(_place(x(step), y(value)) for step, value in points)
    return element("polyline", points=places, class_=kind)


def _titles(lines: Sequence[ChartLine], x: Scale) -> list[Html]:
    """Transparent bars with tooltips of the numbers of a step."""
    tables = {line.label: dict(line.points) for line in lines}
    steps = sorted({step for line in lines for step, _ in line.points})
    shown = steps[:: max(1, math.ceil(len(steps) / MOST_TITLES))]
    width = (WIDTH - LEFT - RIGHT) / max(len(shown), 1)
    parts: list[Html] = []
    for step in shown:
        values = [f"{label} {number(at[step])}" for label, at in tables.items() if step in at]
        title = element("title", f"step {step}\n" + "\n".join(values))
        place = {"x": f"{x(step) - width / 2:.1f}", "y": TOP, "width": f"{width:.1f}"}
        parts.append(element("rect", title, class_="hover", height=HEIGHT - TOP - BOTTOM, **place))
    return parts


def _figure(title: str, lines: Sequence[ChartLine], parts: Sequence[Html]) -> Html:
    box = f"0 0 {WIDTH} {HEIGHT}"
    drawing = element("svg", *parts, viewBox=box, role="img", aria_label=title)
    keys = [
        element("span", element("i", class_=f"fill{i % COLOURS}"), line.label, class_="key")
        for i, line in enumerate(lines)
    ]
    caption = element("figcaption", element("b", title), *keys)
    return element("figure", caption, drawing, class_="card chart-card")


def _place(x: float, y: float) -> str:
    return f"{x:.1f},{y:.1f}"


_MOST_LINES = 6
_PHASES = (*PHASES, "digest", "validate", "save")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """A picture: metrics that belong together.

    Example:
        >>> ChartSpec(title="Entropy", names=("actor/entropy",)).names
        ('actor/entropy',)
    """

    title: str
    """Heading."""
    names: tuple[str, ...]
    """Metrics; one that ends with `*` stands for all that begin so."""


CURVES = (
    ChartSpec(title="Reward", names=("reward/mean",)),
    ChartSpec(
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
    ChartSpec(
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
    ChartSpec(title="Preferences", names=("preference/accuracy", "reward_model/accuracy")),
    ChartSpec(
        title="Implicit rewards", names=("preference/chosen_reward", "preference/rejected_reward")
    ),
    ChartSpec(title="Value loss", names=("critic/vf_loss",)),
    ChartSpec(title="KL to the reference", names=("actor/ref_kl", "actor/kl_loss")),
    ChartSpec(title="KL of the update (old to new policy)", names=("actor/ppo_kl",)),
    ChartSpec(title="Tokens right", names=("sft/accuracy", "sft/val_accuracy")),
    ChartSpec(title="Share of conversations that call a tool", names=("tools/call_fraction",)),
    ChartSpec(title="Tool calls in a conversation", names=("tools/calls_mean",)),
    ChartSpec(title="Share of tool calls that fail", names=("tools/error_fraction",)),
    ChartSpec(title="Reverse KL to the teacher", names=("distill/reverse_kl",)),
    ChartSpec(title="Entropy", names=("actor/entropy",)),
    ChartSpec(
        title="Gradient norm", names=("actor/grad_norm", "critic/grad_norm", "sft/grad_norm")
    ),
    ChartSpec(title="Learning rate", names=("actor/lr", "critic/lr", "sft/lr")),
    ChartSpec(
        title="Lengths", names=("response_length/mean", "response_length/max", "prompt_length/mean")
    ),
    ChartSpec(title="Tokens a second", names=("time/tokens_per_s",)),
)


def curves_section(record: RunRecord) -> Html:
    """The learning curves; missing ones are listed."""
    charts: list[Html] = []
    absent: list[str] = []
    for curve in CURVES:
        lines = lines_of(record, curve.names)
        if lines:
            charts.append(line_chart(curve.title, lines))
        else:
            absent.append(curve.title)
    return joined(
        element("div", *charts, class_="grid") if charts else None,
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
    return element("div", *charts, class_="grid")


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
    finite = ChartLine(label="", points=_points(record, "parity/max_gap")).finite
    largest = max((value for _, value in finite), default=None)
    words = f"Largest gap of any step: {largest:.3g}." if largest is not None else None
    return joined(element("p", words) if words else None, element("div", *charts, class_="grid"))


def timing_section(record: RunRecord) -> Html:
    """Seconds of each phase as stacked areas, and their shares."""
    lines = [
        ChartLine(label=phase, points=points)
        for phase in _PHASES
        if (points := _points(record, f"time/{phase}"))
    ]
    if not lines:
        return missing("The run wrote no times.")
    longest = max(lines, key=lambda line: len(line.points))
    order = [longest, *(line for line in lines if line is not longest)]
    sums = {line.label: sum(value for _, value in line.finite) for line in lines}
    whole = sum(sums.values()) or 1.0
    # As in the chart, where a stripe has the colour of its place.
    colours = {line.label: f"fill{i % COLOURS}" for i, line in enumerate(order)}
    ranked = sorted(sums.items(), key=lambda pair: -pair[1])
    bar = [
        element("span", class_=colours[name], style=f"width:{seconds / whole:.2%}")
        for name, seconds in ranked
    ]
    shares = [
        element(
            "li",
            element("i", class_=colours[name]),
            element("span", name),
            element("span", f"{seconds / whole:.0%}", class_="num"),
            element("span", f"{seconds:,.1f} s", class_="num dim"),
        )
        for name, seconds in ranked
    ]
    spent = element("div", element("div", *bar, class_="share-bar"),
                    element("ul", *shares, class_="shares"), class_="card stack tight")  # fmt: skip
    chart = stack_chart("Seconds of a step by phase", order)
    return joined(spent, element("div", chart, class_="grid"))


def lines_of(record: RunRecord, names: Sequence[str]) -> list[ChartLine]:
    """The metrics among these that the run has, at most as many as there are colours."""
    known = {name for line in record.lines for name in line.values}
    found: list[str] = []
    for name in names:
        begins = name.removesuffix("*")
        found += sorted(n for n in known if n == name or (begins != name and n.startswith(begins)))
    kept = list(dict.fromkeys(found))[:_MOST_LINES]
    return [ChartLine(label=name, points=_points(record, name)) for name in kept]


def _points(record: RunRecord, name: str) -> tuple[tuple[int, float], ...]:
    steps, values = series(list(record.lines), name)
    return tuple(zip(steps, values, strict=True))
