"""Digests of a run: for each step a hash of every stage, chained, one line each.

A line hashes what a step did, stage by stage in the order it happened, and the chain of the line
before. Two runs with the same last chain did the same in every step; where they do not, the first
stage that differs in the first step that differs is where they parted.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.files import append, json_line, read_lines, write_whole, writing
from luyen.base.owned import open_lines

SCHEMA = 1
"""Version of the lines and of what is hashed; a reader refuses a later one."""
STAGES = ("prompts", "rollouts", "rewards", "advantages", "gradients", "weights", "metrics")
"""The stages of a step in the order in which each follows from those before it."""
BEGINNING = hashlib.sha256(b"luyen digests 1").hexdigest()
"""The chain of a run that has done nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDigest:
    """What one step did, as hashes.

    Example:
        >>> step = link(BEGINNING, step=1, stages={"metrics": hash_value({"loss": 0.5})})
        >>> step.previous == BEGINNING, step.chain == link(BEGINNING, step=1, stages={}).chain
        (True, False)
    """

    step: int
    """The step; 0 is the validation before training."""
    stages: Mapping[str, str]
    """SHA-256 of each stage that the step had, by the names of `STAGES`."""
    previous: str
    """Chain of the line before, or of the checkpoint the run went on from."""
    chain: str
    """SHA-256 of step, stages and `previous`."""


def link(previous: str, *, step: int, stages: Mapping[str, str]) -> StepDigest:
    """The digest of a step that follows a chain."""
    unknown = stages.keys() - set(STAGES)
    assert not unknown, f"unknown stages: {sorted(unknown)}"
    chain = hash_value({"previous": previous, "step": step, "stages": dict(stages)})
    return StepDigest(step=step, stages=dict(stages), previous=previous, chain=chain)


def hash_value(value: Any) -> str:
    """SHA-256 of plain data: equal content gives equal hashes, in any order of keys.

    Example:
        >>> hash_value({"a": 1, "b": (2.0,)}) == hash_value({"b": [2.0], "a": 1})
        True
    """
    return hashlib.sha256(_text(value)).hexdigest()


def hash_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of byte strings in order; where one ends and the next begins counts.

    Example:
        >>> hash_parts([b"ab", b"c"]) == hash_parts([b"a", b"bc"])
        False
    """
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _text(value: Any) -> bytes:
    # Escaped, since a policy may write half of a surrogate pair, which UTF-8 cannot hold.
    return json.dumps(value, sort_keys=True, default=str).encode()


@final
class DigestFile:
    """`digests.jsonl`: one line a step, each in one write."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Steps from `first_step` on will be done again: their lines are dropped."""
        if path.is_file():
            kept = [d for d in read_digests(path) if d.step < first_step] if first_step else []
            write_whole(path, "".join(_line(digest) for digest in kept))
        self._path = path
        with writing(path):
            self._file = open_lines(path)

    def write(self, digest: StepDigest) -> None:
        """Append the line of a step."""
        append(self._file, _line(digest).encode())

    def sync(self) -> None:
        """Force the lines to the disk, so that no checkpoint is ahead of them."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_digests(path: Path) -> list[StepDigest]:
    """The lines of a file of digests; a torn last one is left out, a changed one is an error."""
    if not path.is_file():
        why = "it is missing: the run was supervised, or is older than digests, or it was removed"
        raise UserError("file", str(path), why, "give a run that has one")
    return [_digest(path, number, line) for number, line in enumerate(read_lines(path), 1)]


def _line(digest: StepDigest) -> str:
    return json_line(
        {
            "schema": SCHEMA,
            "step": digest.step,
            "stages": digest.stages,
            "previous": digest.previous,
            "chain": digest.chain,
        }
    )


def _digest(path: Path, number: int, line: dict[str, Any]) -> StepDigest:
    schema = line.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        why = f"it follows layout {schema}, and this version reads up to {SCHEMA}"
        raise UserError("file", str(path), why, "install a newer luyen")
    stages, step = line.get("stages"), line.get("step")
    previous = line.get("previous")
    if schema == SCHEMA and isinstance(stages, dict) and isinstance(step, int):
        hashes = cast(dict[str, str], stages)
        if hashes.keys() <= set(STAGES):
            found = link(str(previous), step=step, stages=hashes)
            if found.chain == line.get("chain"):
                return found
    why = f"line {number} is not as it was written: its chain does not follow from its stages"
    fix = "restore it from a copy, or remove the file: a run goes on without the earlier digests"
    raise UserError("file", str(path), why, fix)
