"""`canary.jsonl`: what was compared, every score, every decision; a server that restarts goes on.

One JSON object a line: a `begin` with the weights of both models, where scores come from and the
limits, then scores and at most one decision. A file may hold several comparisons; the last one
counts.
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, final, get_args

from luyen.base.errors import UserError
from luyen.serve.canary_decision import Arm, CanaryLimits, CanaryState, Outcome


@final
class CanaryLog:
    """Appends to the file of a comparison."""

    def __init__(
        self, path: Path, *, stable: str, candidate: str, limits: CanaryLimits, source: str
    ) -> None:
        """`stable` and `candidate` are digests of the weights; `source` says what scores are."""
        self._path = path
        models = {"stable": stable, "candidate": candidate}
        self._begin = {**models, "source": source, "limits": asdict(limits)}
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
        """Lines of the file; the last one may be torn, and is then cut off."""
        try:
            raw = self._path.read_bytes() if self._path.exists() else b""
            end = raw.rfind(b"\n") + 1
            found = self._records(raw[:end].decode())
            is_own = bool(found) or raw.startswith(b'{"event"')
            if is_own and end < len(raw):
                # A line that follows must not continue it. Only a file of this kind is cut.
                os.truncate(self._path, end)
        except (OSError, UnicodeError) as error:
            why = f"it cannot be read: {error}"
            raise UserError("--canary-log", str(self._path), why, "name another file") from error
        if raw and not is_own:
            why = "it holds no line of a comparison"
            raise UserError("--canary-log", str(self._path), why, "name another file")
        return found

    def _records(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                found.append(_record(line))
            except (ValueError, KeyError, TypeError):
                why = f"line {number} is not one of this file: {line[:80]!r}"
                raise UserError("--canary-log", str(self._path), why, "name another file") from None
        return found


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "begin": {"stable": str, "candidate": str, "source": str, "limits": dict},
    "score": {"model": str, "score": (int, float)},
    "decision": {"outcome": str, "why": str},
}


def _record(line: str) -> dict[str, Any]:
    found = json.loads(line)
    for name, kind in _FIELDS[found["event"]].items():
        if not isinstance(found[name], kind):
            raise TypeError(name)
    if found["event"] == "score":
        is_fine = found["model"] in get_args(Arm) and 0.0 <= found["score"] <= 1.0
    else:
        is_fine = found.get("outcome", "promoted") in get_args(Outcome)
    if not is_fine:
        raise ValueError(found["event"])
    return found
