"""The runs of a sweep: every combination of the values that are given, or a list of overrides."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

from luyen.base.errors import UserError

MOST_RUNS = 1000
"""More than anybody waits for; a grid grows quickly."""
_LONGEST = 80
_NO_NAME = re.compile(r"[^A-Za-z0-9_.=+-]+")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run of a sweep.

    Example:
        >>> Variant(words=("trainer.seed=1",)).name
        'seed=1'
    """

    words: tuple[str, ...]
    """Overrides in which it differs from the other runs."""

    @property
    def name(self) -> str:
        """The words as a name for a folder, the same for the same words."""
        pairs = [word.partition("=") for word in self.words]
        short = [f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs]
        name = _NO_NAME.sub("_", "+".join(short)) or "run"
        if len(name) <= _LONGEST:
            return name
        digest = hashlib.blake2b(" ".join(self.words).encode(), digest_size=4).hexdigest()
        return f"{name[: _LONGEST - 9]}-{digest}"


def variants(overrides: Sequence[str], listed: Sequence[str]) -> tuple[list[str], list[Variant]]:
    """Overrides that all runs share, and the runs.

    A value with commas outside of brackets and quotes, `key=a,b`, is one value for each run of the
    grid. Each of `listed` is a run by itself, its words separated by spaces, times the grid.

    Example:
        >>> shared, runs = variants(["trainer.seed=1,2", "data.val_files=[a,b]"], [])
        >>> shared, [run.words for run in runs]
        (['data.val_files=[a,b]'], [('trainer.seed=1',), ('trainer.seed=2',)])
    """
    shared: list[str] = []
    axes: list[list[tuple[str, ...]]] = []
    for word in overrides:
        key, _, value = word.partition("=")
        values = split_values(value)
        if len(values) > 1:
            axes.append([(f"{key}={one}",) for one in values])
        else:
            shared.append(word)
    if listed:
        axes.insert(0, [tuple(text.split()) for text in listed])
    count = 1
    for axis in axes:
        count *= len(axis)
    if not axes or count > MOST_RUNS:
        why = "there is nothing to vary" if not axes else f"{count} runs are more than {MOST_RUNS}"
        fix = "give several values, KEY=A,B, or several --run" if not axes else "give fewer values"
        raise UserError("sweep", " ".join(overrides), why, fix)
    found = [Variant(words=tuple(w for part in parts for w in part)) for parts in product(*axes)]
    return shared, list({variant.words: variant for variant in found}.values())


def split_values(text: str) -> list[str]:
    """The values of `a,b`; commas inside of brackets and quotes belong to a value.

    Example:
        >>> split_values("1e-6,[a, b],'x,y'")
        ['1e-6', '[a, b]', "'x,y'"]
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and not depth:
            values.append("")
            continue
        values[-1] += letter
    return [value.strip() for value in values]
