"""The planted-defect score: every defect is named by its rule, and healthy runs are left in peace.

Run as a script, it prints the table and fails if a defect is missed or a healthy run is accused.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import final

import torch

from luyen.studio.doctor.diagnose import RULES, diagnose
from luyen.studio.doctor.record import read_run
from tests.defects.edits import EDITS
from tests.defects.healthy import healthy_runs, train_quick
from tests.defects.parts import SABOTAGED, WITH_TOOLS, sabotage

BASE = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "trainer.total_training_steps=24",
)
"""The run in whose files defects are planted: a critic and a reference measure the most."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run of the table.

    Example:
        >>> Row(name="learning rate 0", wanted="learning-rate", found=("learning-rate",)).is_right
        True
    """

    name: str
    """The defect, or the kind of healthy run."""
    wanted: str | None
    """The rule that must name it; None: a healthy run."""
    found: tuple[str, ...]
    """Rules that found something."""

    @property
    def is_right(self) -> bool:
        """Whether the defect was named, or nothing was said of a healthy run."""
        return self.wanted in self.found if self.wanted else not self.found

    @property
    def others(self) -> str:
        """What else was found: a defect has consequences."""
        return ", ".join(rule for rule in self.found if rule != self.wanted)


def found_in(root: Path) -> tuple[str, ...]:
    """Rules that find something in a run, each once."""
    return tuple(dict.fromkeys(finding.rule for finding in diagnose(read_run(root))))


def planted(name: str, base: Path, folder: Path) -> Row:
    """A defect planted in a copy of a healthy run."""
    wanted, plant = EDITS[name]
    shutil.copytree(base, folder)
    plant(folder)
    return Row(name=name, wanted=wanted, found=found_in(folder))


def sabotaged(name: str, folder: Path) -> Row:
    """A defect that really ran."""
    wanted = (WITH_TOOLS if name in WITH_TOOLS else SABOTAGED)[name][0]
    return Row(name=name, wanted=wanted, found=found_in(sabotage(name, folder)))


def healthy(name: str, folder: Path) -> Row:
    """A run without a defect."""
    return Row(name=name, wanted=None, found=found_in(healthy_runs()[name](folder)))


def edited(folder: Path) -> list[Row]:
    """Every defect that is planted in the files of one run, after that run itself."""
    base = train_quick(folder / "base", *BASE)
    sound = Row(name="where defects are planted", wanted=None, found=found_in(base))
    return [sound, *(planted(name, base, folder / f"edit{i}") for i, name in enumerate(EDITS))]


def rows(folder: Path) -> Iterator[Row]:
    """The whole table, healthy runs first; two processes share the work."""
    with ProcessPoolExecutor(
        2, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as workers:
        edits = workers.submit(edited, folder)
        sound = [workers.submit(healthy, n, folder / n.replace(" ", "_")) for n in healthy_runs()]
        names = [*SABOTAGED, *WITH_TOOLS]
        broken = [workers.submit(sabotaged, n, folder / n.replace(" ", "_")) for n in names]
        yield from (future.result() for future in sound)
        yield from edits.result()
        yield from (future.result() for future in broken)


def main() -> int:
    """Print each row as it is known, and the score; 1 when something is missed."""
    began, table = time.monotonic(), list[Row]()
    print(f"{'run':34s} {'rule':24s} {'verdict':12s} also found")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder)):
            table.append(row)
            right, wrong = ("found", "MISSED") if row.wanted else ("silent", "FALSE ALARM")
            verdict = right if row.is_right else wrong
            print(f"{row.name:34s} {row.wanted or '':24s} {verdict:12s} {row.others}", flush=True)
    defects = [row for row in table if row.wanted]
    sound = [row for row in table if not row.wanted]
    untried = sorted(set(RULES) - {row.wanted for row in defects})
    print(
        f"{sum(r.is_right for r in defects)} of {len(defects)} defects named, "
        f"{sum(not r.is_right for r in sound)} false alarms on {len(sound)} healthy runs, "
        f"{len(RULES) - len(untried)} of {len(RULES)} rules tried, "
        f"{time.monotonic() - began:.0f} s"
    )
    if untried:
        print(f"no defect for: {', '.join(untried)}")
    return 0 if all(row.is_right for row in table) and not untried else 1


if __name__ == "__main__":
    sys.exit(main())
