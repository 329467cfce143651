"""The display of a run: a live panel in a terminal, one line per step in a log or pipe.

The training loop reports the number of steps, the current phase, the metrics of each step and the
end of the run, and before the first step what it waits for. Displays are output only: nothing reads
them back.
"""

import math
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TextIO, final

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from luyen.telemetry.progress import PROGRESS, ProgressState

# Figures: which metrics are shown, and how they are formatted.

HEADING: ContextVar[str] = ContextVar("heading", default="")
"""Heading of displays opened in this context, such as the stage of a pipeline."""


ACCURACY = "validation accuracy"
"""Label for the share of samples with reward 1, where every reward is 0 or 1."""
VALIDATION_REWARD = "validation reward"
"""Label for the mean reward of a validation."""
MEAN = "val/reward/mean@"
"""Prefix of the metric of a validation's mean reward; the number of samples follows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number on the display.

    Example:
        >>> Figure(label="KL to ref", names=("actor/ref_kl", "actor/kl_loss"), form=".4f").show(
        ...     {"actor/kl_loss": 0.00123})
        '0.0012'
    """

    label: str
    """What it is called."""
    names: tuple[str, ...]
    """Metrics it may come from; the first that the step has is shown."""
    form: str
    """How it is formatted."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The number itself; None when the step has none."""
        known = {**metrics, **validated(metrics)}
        return next((known[name] for name in self.names if name in known), None)

    def show(self, metrics: Mapping[str, float]) -> str | None:
        """The number as text; None when the step has none."""
        value = self.value(metrics)
        return None if value is None else format(value, self.form)


def mean_reward(metrics: Mapping[str, float]) -> float | None:
    """The mean reward of a validation; None where there was none."""
    return next((v for name, v in metrics.items() if name.startswith(MEAN)), None)


def validated(metrics: Mapping[str, float]) -> dict[str, float]:
    """The headline number of a validation: an accuracy if all rewards are 0 or 1, else the mean.

    Rewards are all 0 or 1 exactly if the share of samples with reward 1 equals the mean reward.

    Example:
        >>> validated({"val/accuracy": 0.25, "val/reward/mean@1": 0.25})
        {'validation accuracy': 0.25}
        >>> validated({"val/accuracy": 0.25, "val/reward/mean@1": 0.4})
        {'validation reward': 0.4}
    """
    share = metrics.get("val/accuracy")
    if share is None:
        return {}
    mean = mean_reward(metrics)
    if mean is None:
        return {ACCURACY: share}
    is_accuracy = math.isclose(mean, share, rel_tol=1e-9, abs_tol=1e-12)
    return {ACCURACY: share} if is_accuracy else {VALIDATION_REWARD: mean}


FIGURES = (
    Figure(label="reward", names=("reward/mean",), form=".3f"),
    Figure(label="accuracy", names=(ACCURACY,), form=".3f"),
    Figure(label="val reward", names=(VALIDATION_REWARD,), form=".3f"),
    Figure(label="nll", names=("sft/nll",), form=".3f"),
    Figure(label="tokens right", names=("sft/accuracy",), form=".3f"),
    Figure(label="loss", names=("preference/loss", "reward_model/loss"), form=".4f"),
    Figure(label="pairs right", names=("preference/accuracy", "reward_model/accuracy"), form=".3f"),
    Figure(label="from teacher", names=("distill/divergence", "distill/reverse_kl"), form=".4f"),
    Figure(label="entropy", names=("actor/entropy",), form=".3f"),
    Figure(label="length", names=("response_length/mean",), form=".1f"),
    Figure(label="calls a tool", names=("tools/call_fraction",), form=".0%"),
    Figure(label="calls", names=("tools/calls_mean",), form=".2f"),
    Figure(label="tool errors", names=("tools/error_fraction",), form=".0%"),
    Figure(label="KL to ref", names=("actor/ref_kl", "actor/kl_loss"), form=".4f"),
    Figure(label="update KL", names=("actor/ppo_kl",), form=".4f"),
    Figure(label="parity gap", names=("parity/max_gap",), form=".2g"),
    Figure(label="tokens/s", names=("time/tokens_per_s",), form=",.0f"),
)
"""Figures of both displays; the live display also shows the first one as a sparkline."""


@final
class Clock:
    """Steps done, elapsed time and estimated time left."""

    def __init__(self) -> None:
        self.total = self.done = self._first = 0
        self._begun = time.monotonic()

    def start(self, total: int, done: int) -> None:
        """Start the clock; steps of an earlier session do not count for the speed."""
        self.total, self.done, self._first = total, done, done
        self._begun = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    def left_s(self) -> float | None:
        """Seconds to the end at the mean speed so far; None before the first step."""
        made = self.done - self._first
        return self.elapsed_s() / made * (self.total - self.done) if made > 0 else None


def duration(seconds: float | None) -> str:
    """Seconds for people.

    Example:
        >>> duration(5), duration(75), duration(7260), duration(None)
        ('5s', '1m15s', '2h01m', '?')
    """
    if seconds is None:
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    return (
        f"{whole // 60}m{whole % 60:02d}s"
        if whole < 3600
        else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    )


def sparkline(values: list[float], width: int) -> str:
    """The last values as bars, lowest to highest.

    Example:
        >>> sparkline([0.0, 0.5, 1.0], 8)
        '▁▅█'
    """
    shown = [v for v in values if v == v and abs(v) != float("inf")][-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((v - low) * scale)] for v in shown)


# Plain lines for logs and pipes: one per step, and progress lines during long waits.

_LOOK_S = 1.0
_LEAST_S = 10.0
"""Seconds between two lines about the same wait."""
_MOST_S = 30.0
"""Seconds after which a line is written even if less than a tenth was done since the last one."""


@final
class PlainDisplay:
    """One line a step, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._clock = Clock()
        self._heading = HEADING.get()
        self._last_line: tuple[str, int, float] | None = None
        self._over = threading.Event()
        self._reporter = threading.Thread(target=self._report, daemon=True, name="progress")

    def waiting(self, words: str) -> None:
        """Write the line."""
        self._stream.write(f"{words}\n")
        self._stream.flush()

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Begin to count."""
        self._clock.start(total_steps, done)
        self._reporter.start()

    def phase(self, name: str) -> None:
        """A log shows steps, not phases."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        self._clock.done = step
        known = [(figure.label, figure.show(metrics)) for figure in FIGURES]
        words = [f"{label} {text}" for label, text in known if text is not None]
        place = f"step {step:>{len(str(self._clock.total))}}/{self._clock.total}"
        words = [self._heading, *words] if self._heading else words
        words += [
            f"{duration(self._clock.elapsed_s())} gone, {duration(self._clock.left_s())} left"
        ]
        self._stream.write("  ".join([place, *words]) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Stop the progress thread; the stream belongs to the caller and stays open."""
        self._over.set()
        if self._reporter.is_alive():
            self._reporter.join()

    def _report(self) -> None:
        """Body of the progress thread: write a line now and then while the run waits."""
        while not self._over.wait(_LOOK_S):
            watched = PROGRESS.now()
            if watched is None or not self._is_due(watched):
                continue
            place = f"step {self._clock.done}/{self._clock.total}"
            try:
                self._stream.write(f"{place}  {watched.words()}, {duration(watched.seconds)}\n")
                self._stream.flush()
            except (OSError, ValueError):
                return  # the next step reports the broken stream

    def _is_due(self, watched: ProgressState) -> bool:
        """Whether enough time and work has passed since the last line about it."""
        name, done, when = self._last_line or ("", 0, 0.0)
        if name != watched.name or watched.seconds < when:
            done, when = 0, 0.0
        passed = watched.seconds - when
        is_tenth = 10 * (watched.done - done) >= watched.total
        if passed < _LEAST_S or not (is_tenth or passed >= _MOST_S):
            return False
        self._last_line = watched.name, watched.done, watched.seconds
        return True


PHASES = ("generate", "score", "log-probs", "update")
"""Phases of every step, in order; further phases are appended when they first occur."""


class Display(Protocol):
    """Receives the progress of a run."""

    def waiting(self, words: str) -> None:
        """Show why the first step has not begun yet."""
        ...

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Start with so many steps in total, of which `done` were done before a resume."""
        ...

    def phase(self, name: str) -> None:
        """A phase of the current step begins."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended with these metrics."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


@final
class LiveDisplay:
    """A live panel: progress, phases, figures and a sparkline of the reward."""

    def __init__(self, console: Console) -> None:
        self._clock = Clock()
        self._phase: str | None = None
        self._phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._since = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._reward_history: list[float] = []
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
        self._reward_history += [] if reward is None else [reward]

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
        spark = sparkline(self._reward_history, 60)
        outer = Table.grid(expand=True)
        outer.add_row(grid)
        outer.add_row(Text(f"reward {spark}", style="green") if spark else Text())
        return outer


@final
class SilentDisplay:
    """Shows nothing: for a run whose `trainer.logger` has no console."""

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


_LARGEST = 500
"""Columns and lines that are drawn at most: a terminal may claim any number."""


@final
class BoundedConsole(Console):
    """A console whose size has a bound.

    Example:
        >>> BoundedConsole(file=sys.stdout, width=10**8).size.width
        500
    """

    @property
    def size(  # pyright: ignore[reportIncompatibleMethodOverride] - nothing sets it
        self,
    ) -> ConsoleDimensions:
        """Columns and lines."""
        found = super().size
        return ConsoleDimensions(min(found.width, _LARGEST), min(found.height, _LARGEST))


def open_display(stream: TextIO | None = None) -> Display:
    """The live panel where the stream is a terminal that can redraw, plain lines elsewhere."""
    console = BoundedConsole(file=stream or sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(stream or sys.stdout)
