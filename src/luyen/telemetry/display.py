"""What a person sees while a run goes on: a live panel in a terminal, a line a step elsewhere.

A display is told how many steps there will be, which phase begins, what a step measured, and that
it is over; before the first step, also what is waited for. It computes nothing that anything else
reads.
"""

import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from luyen.telemetry.figures import FIGURES, HEADING, Clock, duration, sparkline
from luyen.telemetry.plain_display import PlainDisplay
from luyen.telemetry.progress import PROGRESS

PHASES = ("generate", "score", "log-probs", "update")
"""The phases that every step goes through, in order; others are shown when they come."""


class Display(Protocol):
    """What the loop tells whoever is watching."""

    def waiting(self, words: str) -> None:
        """The first step is not there yet, and this is why."""
        ...

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """The run will have so many steps, of which a resumed one has some behind it."""
        ...

    def phase(self, name: str) -> None:
        """A phase of the current step begins."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over and measured this."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


@final
class LiveDisplay:
    """A panel that redraws itself: progress, phases, figures and the course of the reward."""

    def __init__(self, console: Console) -> None:
        self._clock = Clock()
        self._phase: str | None = None
        self._phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._since = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._course: list[float] = []
        self._console = console
        self._title = f"luyen: {HEADING.get()}" if HEADING.get() else "luyen"
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=False
        )

    def waiting(self, words: str) -> None:
        """Write the line above the panel that will come."""
        self._console.print(Text(words, style="dim"))

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Show the panel."""
        self._clock.start(total_steps, done)
        self._live.start()

    def phase(self, name: str) -> None:
        """Mark the phase and time the one before it."""
        now = time.monotonic()
        ended = {} if self._phase is None else {self._phase: now - self._since}
        # A new dict, since the thread that redraws may be going through the old one.
        self._phases = self._phases | ended | {name: 0.0}
        self._phase, self._since = name, now

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show what a step measured."""
        self._clock.done = step
        self._metrics.update(metrics)
        reward = FIGURES[0].value(metrics)
        self._course += [] if reward is None else [reward]

    def close(self) -> None:
        """Leave the last panel on the screen."""
        self._phase = None
        self._live.stop()

    def _render(self) -> RenderableType:
        clock = self._clock
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        head.add_row(
            Text(f"step {clock.done}/{clock.total}", style="bold"),
            ProgressBar(total=max(clock.total, 1), completed=clock.done),
            f"{duration(clock.elapsed_s())} gone, {duration(clock.left_s())} left",
        )
        return Panel(Group(head, self._phase_line(), self._figure_grid()), title=self._title)

    def _phase_line(self) -> Text:
        line = Text()
        for name, took in self._phases.items():
            active = name == self._phase
            seconds = time.monotonic() - self._since if active else took
            mark, style = ("▶", "bold cyan") if active else ("·", "dim")
            watched = PROGRESS.now() if active else None
            part = f", {watched.done} of {watched.total}" if watched is not None else ""
            line.append(f"{mark} {name} {seconds:.1f}s{part}   ", style=style)
        return line

    def _figure_grid(self) -> Table:
        grid = Table.grid(padding=(0, 1), expand=True)
        # No run measures all of them, and a narrow terminal has no room for empty columns.
        found = [figure for figure in FIGURES if figure.value(self._metrics) is not None]
        known = found or FIGURES[:2]
        for _ in known:
            grid.add_column(justify="right")
        grid.add_row(*(Text(figure.label, style="dim") for figure in known))
        grid.add_row(*(Text(f.show(self._metrics) or "-", style="bold") for f in known))
        course = sparkline(self._course, 60)
        outer = Table.grid(expand=True)
        outer.add_row(grid)
        outer.add_row(Text(f"reward {course}", style="green") if course else Text())
        return outer


@final
class SilentDisplay:
    """Nothing at all, for a run whose `trainer.logger` has no console."""

    def waiting(self, words: str) -> None:
        """Shows nothing."""

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Shows nothing."""

    def phase(self, name: str) -> None:
        """Shows nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


def open_display(stream: TextIO | None = None) -> Display:
    """The live panel where the stream is a terminal that can redraw, plain lines elsewhere."""
    console = Console(file=stream or sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(stream or sys.stdout)
