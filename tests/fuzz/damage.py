"""Damages to one file of a run, each a pure function of its number."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

KINDS = {
    "manifest.json": "manifest.json",
    "config.yaml": "config.yaml",
    "provenance.json": "provenance.json",
    "resumptions.json": "resumptions.json",
    "metrics.jsonl": "metrics.jsonl",
    "digests.jsonl": "digests.jsonl",
    "rollouts": "rollouts/*.parquet",
    "validation": "validation/*.parquet",
    "parity": "parity/*.json",
    "events": "events/*",
    "tensorboard": "tensorboard/*",
    "checkpoint: manifest": "checkpoints/*/manifest.json",
    "checkpoint: states": "checkpoints/*/*.json",
    "checkpoint: indices": "checkpoints/*/*/index.json",
    "checkpoint: tensors": "checkpoints/*/*/*.safetensors",
    "journal": "journal/*.jsonl",
}
"""Kinds of files and where they lie."""
MOST_READ = ("metrics.jsonl", "digests.jsonl", "rollouts", "checkpoint: tensors", "journal")
"""Kinds that are damaged more often: most depends on them."""


def _delete(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.unlink()


def _truncate(path: Path, chance: random.Random, others: list[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(1, len(data))])


def _empty(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.write_bytes(b"")


def _flip(path: Path, chance: random.Random, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def _garbage(path: Path, chance: random.Random, others: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 200)))


def _swap(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.write_bytes(chance.choice(others).read_bytes())


DAMAGES: dict[str, Callable[[Path, random.Random, list[Path]], None]] = {
    "deleted": _delete,
    "truncated": _truncate,
    "emptied": _empty,
    "a bit flipped": _flip,
    "garbage appended": _garbage,
    "content of another": _swap,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damage to one file of one run."""

    number: int
    """Seed of every choice."""
    shape: str
    """What kind of run: single-turn or tool-calling."""
    kind: str
    """Which files, by the names of `KINDS`."""
    how: str
    """What is done to one of them, by the names of `DAMAGES`."""

    def __str__(self) -> str:
        return f"{self.number}: {self.shape}, {self.kind}, {self.how}"

    def choose(self, root: Path) -> Path:
        """The file that is damaged."""
        files = self._files(root, self.kind)
        assert files, f"the run has no file of the kind {self.kind}"
        return self._chance().choice(files)

    def apply(self, root: Path) -> Path:
        """Damage a run; which file it was."""
        path, chance = self.choose(root), self._chance()
        same = [file for file in self._files(root, self.kind) if file != path]
        all_files = [file for kind in KINDS for file in self._files(root, kind) if file != path]
        DAMAGES[self.how](path, chance, same or all_files)
        return path

    def _chance(self) -> random.Random:
        return random.Random(self.number)

    @staticmethod
    def _files(root: Path, kind: str) -> list[Path]:
        files = [path for path in root.glob(KINDS[kind]) if path.is_file()]
        return sorted(path for path in files if path.stat().st_size > 1)


def all_damages(count: int = 200) -> list[Damage]:
    """Every damage to every kind of file of both kinds of run, then more to those most read."""
    shapes = ("single-turn", "tool-calling")
    found = [(shape, kind, how) for shape in shapes for kind in KINDS for how in DAMAGES]
    more = [
        (shape, kind, how)
        for how in ("a bit flipped", "truncated")
        for kind in MOST_READ
        for shape in shapes
    ]
    while len(found) < count:
        found += more[: count - len(found)]
    return [
        Damage(number=number, shape=shape, kind=kind, how=how)
        for number, (shape, kind, how) in enumerate(found)
    ]


def quick_damages() -> list[Damage]:
    """Two damages to every kind of file, over changing damages."""
    one = [damage for damage in all_damages() if damage.shape == "single-turn"]
    found: list[Damage] = []
    for index, kind in enumerate(KINDS):
        own = [damage for damage in one if damage.kind == kind][: len(DAMAGES)]
        found += [own[(2 * index) % len(own)], own[(2 * index + 3) % len(own)]]
    return found
