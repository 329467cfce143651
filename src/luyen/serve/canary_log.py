"""`canary.jsonl`: what was compared, every score, every decision; a server that restarts goes on.

One JSON object a line: a `begin` with the weights of both models and the limits, then scores and at
most one decision. A file may hold several comparisons; the last one counts.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.serve.canary import CanaryLimits, CanaryState


@final
class CanaryLog:
    """Appends to the file of a comparison."""

    def __init__(self, path: Path, *, stable: str, candidate: str, limits: CanaryLimits) -> None:
        """`stable` and `candidate` are digests of the weights."""
        self._path = path
        self._begin = {"stable": stable, "candidate": candidate, "limits": asdict(limits)}
        self._limits = limits

    def resume(self) -> CanaryState:
        """The state after the scores that the file has of the same comparison; begins a new one.

        A UserError where the file cannot be read or written.
        """
        lines = self._read()
        begins = [i for i, line in enumerate(lines) if line.get("event") == "begin"]
        state = CanaryState.begin(self._limits)
        last = lines[begins[-1]] if begins else {}
        if {name: last.get(name) for name in self._begin} != self._begin:
            self._append("begin", **self._begin)
            return state
        for line in lines[begins[-1] + 1 :]:
            if line["event"] == "score":
                state = state.observe(line["model"], line["score"])
            elif line["event"] == "decision":
                state = state.decide(line["outcome"], line["why"])
        return state

    def score(self, id: str, model: str, score: float, source: str) -> None:
        """Note a score of an answer."""
        self._append("score", id=id, model=model, score=score, source=source)

    def decision(self, state: CanaryState) -> None:
        """Note the decision of a state."""
        assert state.decision is not None, "there is a decision"
        found = {name: asdict(scores) for name, scores in state.scores.items()}
        self._append("decision", **asdict(state.decision), pairs=state.pairs, scores=found)

    def _append(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **fields}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            why = f"decisions cannot be written: {error.strerror or error}"
            raise UserError("--canary-log", str(self._path), why, "name another file") from error

    def _read(self) -> list[dict[str, Any]]:
        """Lines of the file; the last one may be torn, and is then left out."""
        try:
            text = self._path.read_text() if self._path.exists() else ""
        except (OSError, UnicodeError) as error:
            why = f"it cannot be read: {error}"
            raise UserError("--canary-log", str(self._path), why, "name another file") from error
        *whole, torn = text.split("\n")
        if torn:
            # A line that follows must not continue it.
            self._path.write_text("".join(f"{line}\n" for line in whole))
        found: list[dict[str, Any]] = []
        for number, line in enumerate(whole, start=1):
            try:
                found.append(_record(line))
            except (ValueError, KeyError, TypeError):
                why = f"line {number} is not one of this file: {line[:80]!r}"
                raise UserError("--canary-log", str(self._path), why, "name another file") from None
        return found


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "begin": {"stable": str, "candidate": str, "limits": dict},
    "score": {"model": str, "score": (int, float)},
    "decision": {"outcome": str, "why": str},
}


def _record(line: str) -> dict[str, Any]:
    found = json.loads(line)
    for name, kind in _FIELDS[found["event"]].items():
        if not isinstance(found[name], kind):
            raise TypeError(name)
    return found
