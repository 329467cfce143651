"""The summary printed when a run ends, and `notes.jsonl` with events from outside of the run."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.files import json_line, open_regular, read_lines
from luyen.telemetry.display import duration

FINISHED = "Finished"
"""The headline of a run that reached its last step."""
INTERRUPTED = "Interrupted"
"""The headline of a run that was interrupted."""


def interrupted_code(signal: int | None) -> int:
    """The exit code after a signal, by the convention of shells (128 + n); 1 without a signal.

    Example:
        >>> interrupted_code(2), interrupted_code(15), interrupted_code(1), interrupted_code(None)
        (130, 143, 129, 1)
    """
    return 1 if signal is None else 128 + signal


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A number before and after training.

    Example:
        >>> Change(label="accuracy", before=0.312, after=0.944).words()
        'accuracy 0.312 -> 0.944 (+0.632)'
    """

    label: str
    """What was measured."""
    before: float | None
    """Before the first step; None when it was not measured."""
    after: float | None
    """After the last step; None when it was not measured."""

    def words(self) -> str:
        """As one line of text."""
        if self.before is None and self.after is None:
            return f"{self.label} was not measured"
        if self.before is None or self.after is None:
            known = self.after if self.before is None else self.before
            when = "at the end" if self.before is None else "before the first step"
            return f"{self.label} {known:.3f} {when}"
        return (
            f"{self.label} {self.before:.3f} -> {self.after:.3f} ({self.after - self.before:+.3f})"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of an ended run.

    Example:
        >>> print(RunSummary(headline="Finished", changes=(), steps=30, seconds=95.0,
        ...               files={"metrics": Path("runs/a/b/metrics.jsonl")}).text())
        Finished: 30 steps in 1m35s (3.17 s a step)
        <BLANKLINE>
        Files
          metrics  runs/a/b/metrics.jsonl
    """

    headline: str
    """How the run ended: `FINISHED`, `INTERRUPTED`, or why it stopped early."""
    changes: tuple[Change, ...]
    """Numbers before and after training."""
    steps: int
    """Steps of this session."""
    seconds: float
    """How long they took."""
    files: dict[str, Path]
    """Label -> path of the files of the run."""
    commands: tuple[str, ...] = ()
    """Commands to try next."""
    signal: int | None = None
    """The signal that interrupted the run; None: there was none."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the run ended before its last step."""
        return self.headline == INTERRUPTED

    @property
    def exit_code(self) -> int:
        """0 only when the run reached its end."""
        return interrupted_code(self.signal) if self.is_interrupted else 0

    def text(self) -> str:
        """The summary as it is printed."""
        pace = f" ({self.seconds / self.steps:.2f} s a step)" if self.steps else ""
        count = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        lines = [f"{self.headline}: {count} in {duration(self.seconds)}{pace}"]
        lines += [f"  {change.words()}" for change in self.changes]
        width = max(map(len, self.files), default=0)
        if self.files:
            lines += ["", "Files", *(f"  {k:{width}s}  {path}" for k, path in self.files.items())]
        if self.commands:
            lines += ["", "Try next", *(f"  {command}" for command in self.commands)]
        return "\n".join(lines)


# Notes of a run: events from outside, one per line, shown by `luyen runs`.

NAME = "notes.jsonl"
"""The file in the run directory."""


def note(run: Path, words: str) -> None:
    """Append a note to a run directory; never raises: a failed note must not end the run."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = json_line({"time": when, "pid": os.getpid(), "note": words})
    try:
        handle = open_regular(run / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        return
    try:
        os.write(handle, line.encode())
    except OSError:
        return
    finally:
        os.close(handle)


def stopped_early(step: int) -> str:
    """How the note of a run begins that ended early because something asked for it.

    Example:
        >>> stopped_early(3)
        'stopped early after step 3'
    """
    return f"stopped early after step {step}"


def last_note(run: Path) -> str:
    """The newest note; "" if there is none or the file is damaged.

    Example:
        >>> last_note(Path("/nowhere"))
        ''
    """
    try:
        lines = read_lines(run / NAME)
    except (OSError, UserError):
        return ""
    return str(lines[-1].get("note", "")) if lines else ""
