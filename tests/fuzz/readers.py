"""Who reads which file of a run, and whether a damage is named or changes nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self, TypeAlias, final

from tests.fuzz.bench import FINISHED, KILLED_RUN, Bench, outcome_of
from tests.fuzz.damage import Damage
from tests.fuzz.server import Commands, Said

Verdict: TypeAlias = Literal["named", "same"]
_EVERYONE = ("resume", "doctor", "report", "diff", "replay", "eval")
_NOTES = ("resume", "doctor", "report")
READERS: dict[str, tuple[str, ...]] = {
    "manifest.json": _EVERYONE,
    "config.yaml": _EVERYONE,
    "provenance.json": _NOTES,
    "resumptions.json": _NOTES,
    "metrics.jsonl": ("resume", "replay", "diff other", "doctor", "report", "diff"),
    "digests.jsonl": ("resume", "diff", "replay", "doctor", "report"),
    "rollouts": ("replay", "diff other", "doctor", "report", "resume"),
    "validation": ("doctor", "report", "resume"),
    "parity": ("doctor", "report", "resume"),
    "events": _NOTES,
    "tensorboard": _NOTES,
    "checkpoint: manifest": ("resume", "eval", "replay", "doctor", "report", "resume finished"),
    "checkpoint: states": ("resume", "eval", "replay", "resume finished", "doctor"),
    "checkpoint: indices": ("resume", "eval", "replay", "resume finished"),
    "checkpoint: tensors": ("resume", "eval", "replay", "resume finished"),
    "journal": ("resume", "doctor"),
}
"""Readers by the kind of file, those first to whom it matters most."""
_COMMANDS: dict[str, Callable[[Bench], tuple[str, ...]]] = {
    "diff": lambda bench: ("diff", str(bench.place), str(bench.whole)),
    "diff other": lambda bench: ("diff", str(bench.place), str(bench.other)),
    "doctor": lambda bench: ("doctor", str(bench.place)),
    "report": lambda bench: ("report", str(bench.place)),
    "replay": lambda bench: ("replay", str(bench.place), "--step", "3"),
    "eval": lambda bench: ("eval", str(bench.place), "--json"),
}
_STATUS = (0, 1, 2)
_TIMES = re.compile(r"\d+(\.\d+)? s\b")


@final
class Benches:
    """The runs to be damaged, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        """Everything is below `folder`."""
        self._folder = folder
        self._commands = Commands(folder)
        self._made: dict[str, Bench] = {}

    def of(self, shape: str) -> Bench:
        """The runs of a shape."""
        if shape not in self._made:
            bench = Bench(self._commands, self._folder / shape, shape)
            bench.build()
            self._made[shape] = bench
        return self._made[shape]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()


def judge(bench: Bench, damage: Damage, reader: str) -> Verdict:
    """Damage a run and read it; AssertionError unless it is named, or the result is the same."""
    is_killed = reader == "resume" or damage.kind == "journal"
    name = KILLED_RUN if is_killed else FINISHED
    intact = _intact(bench, reader, name)
    path = damage.apply(bench.put(name))
    if reader.startswith("resume"):
        return _resumed(bench, path)
    said = _said(bench, reader)
    _demand_manners(said)
    if said == intact:
        return "same"
    assert _names(said.text, path) > _names(intact.text, path), (
        f"{reader} of a run with a damaged {path.name} says something else and not why:\n"
        f"{said.status}: {said.text[-3000:]}\ninstead of\n{intact.status}: {intact.text[-3000:]}"
    )
    return "named"


def _intact(bench: Bench, reader: str, name: str) -> Said:
    """What a reader says of the undamaged run."""
    if (reader, name) not in bench.intact and not reader.startswith("resume"):
        bench.put(name)
        bench.intact[reader, name] = _said(bench, reader)
    return bench.intact.get((reader, name), Said(status=0, out="", err=""))


def _said(bench: Bench, reader: str) -> Said:
    said = bench.commands.run(*_COMMANDS[reader](bench))
    page = bench.place / "report.html"
    out = said.out + (page.read_text() if page.is_file() else "")
    return Said(status=said.status, out=_TIMES.sub("", out), err=said.err)


def _resumed(bench: Bench, path: Path) -> Verdict:
    """Go on with a damaged run: it must come to what it would have come to, or say why not."""
    said = bench.train()
    _demand_manners(said)
    is_named = _names(said.err, path) > 0  # what it prints at its end lists files anyway
    if said.status != 0:
        assert is_named, f"it stopped and does not name {path.name}: {said.text[-3000:]}"
        return "named"
    found, wanted = outcome_of(bench.place), outcome_of(bench.whole)
    if found == wanted:
        return "named" if is_named else "same"
    assert is_named, f"what became of it differs, and {path.name} is not named: {said.text[-3000:]}"
    assert found.weights == wanted.weights, "the weights differ"
    assert found.chains.items() <= wanted.chains.items(), "it did something else"
    assert found.chains[4] == wanted.chains[4]
    assert all(wanted.metrics[step] == found.metrics[step] for step in found.metrics)
    return "named"


def _demand_manners(said: Said) -> None:
    assert said.status is not None, "it hangs"
    assert "Traceback" not in said.text, said.text[-4000:]
    assert said.status in _STATUS, f"exit status {said.status}: {said.text[-3000:]}"


def _names(text: str, path: Path) -> int:
    """How often a text names a file."""
    return text.count(path.name)
