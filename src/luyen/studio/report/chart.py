"""Metrics over the steps as SVG: lines, or areas on top of one another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.studio.report.markup import Html, element, number
from luyen.studio.report.scale import Scale, running_mean, thinned, ticks, value_range

WIDTH, HEIGHT = 520, 210
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 26
MOST_POINTS, MOST_TITLES = 600, 150
_SMOOTH_FROM = 40
"""Points from which on a line is drawn pale, with its running mean over it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One metric over the steps.

    Example:
        >>> Line(label="reward/mean", points=((1, 0.5), (2, float("nan")))).finite
        [(1, 0.5)]
    """

    label: str
    """Its name."""
    points: tuple[tuple[int, float], ...]
    """Step and value, in order."""

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The points that can be drawn."""
        return [point for point in self.points if math.isfinite(point[1])]


def line_chart(title: str, lines: Sequence[Line]) -> Html:
    """A figure with the lines, a legend, and the numbers of a step under the pointer."""
    x, y = _axes(lines, value_range([v for line in lines for _, v in line.points]))
    parts = [*_grid(x, y)]
    for i, line in enumerate(lines):
        parts += _drawn(line, x, y, f"c{i % 6}")
    parts += _titles(lines, x)
    return _figure(title, lines, parts)


def stack_chart(title: str, lines: Sequence[Line]) -> Html:
    """A figure with areas on top of one another; a line without a step counts as 0 there."""
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
        parts.append(element("polygon", points=" ".join(top + bottom), class_=f"a{i % 6}"))
    parts += _titles(lines, x)
    return _figure(title, lines, parts)


def _axes(lines: Sequence[Line], values: tuple[float, float]) -> tuple[Scale, Scale]:
    steps = [step for line in lines for step, _ in line.points]
    first, last = min(steps), max(steps)
    first, last = (first - 1, last + 1) if first == last else (first, last)
    x = Scale(low=first, high=last, start=LEFT, end=WIDTH - RIGHT)
    return x, Scale(low=values[0], high=values[1], start=HEIGHT - BOTTOM, end=TOP)


def _grid(x: Scale, y: Scale) -> list[Html]:
    parts: list[Html] = []
    for value in ticks(y.low, y.high, 4):
        place = f"{y(value):.1f}"
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place, class_="grid"))
        words = number(value)
        parts.append(element("text", words, x=LEFT - 6, y=f"{y(value) + 4:.1f}", text_anchor="end"))
    for value in ticks(x.low, x.high, 6):
        if value == int(value):
            place = f"{x(value):.1f}"
            parts.append(element("text", int(value), x=place, y=HEIGHT - 8, text_anchor="middle"))
    return parts


def _drawn(line: Line, x: Scale, y: Scale, colour: str) -> list[Html]:
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


def _titles(lines: Sequence[Line], x: Scale) -> list[Html]:
    """Strips over the whole height that say the numbers of their step."""
    tables = {line.label: dict(line.points) for line in lines}
    steps = sorted({step for line in lines for step, _ in line.points})
    shown = steps[:: max(1, math.ceil(len(steps) / MOST_TITLES))]
    width = (WIDTH - LEFT - RIGHT) / max(len(shown), 1)
    parts: list[Html] = []
    for step in shown:
        said = [f"{label} {number(at[step])}" for label, at in tables.items() if step in at]
        title = element("title", f"step {step}\n" + "\n".join(said))
        place = {"x": f"{x(step) - width / 2:.1f}", "y": TOP, "width": f"{width:.1f}"}
        parts.append(element("rect", title, class_="tip", height=HEIGHT - TOP - BOTTOM, **place))
    return parts


def _figure(title: str, lines: Sequence[Line], parts: Sequence[Html]) -> Html:
    box = f"0 0 {WIDTH} {HEIGHT}"
    drawing = element("svg", *parts, viewBox=box, role="img", aria_label=title)
    keys = [
        element("span", element("i", class_=f"k{i % 6}"), line.label, class_="key")
        for i, line in enumerate(lines)
    ]
    caption = element("figcaption", element("b", title), *keys)
    return element("figure", caption, drawing)


def _place(x: float, y: float) -> str:
    return f"{x:.1f},{y:.1f}"
