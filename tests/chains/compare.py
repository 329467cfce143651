"""`python -m tests.chains.compare OLD_TREE NEW_TREE [RUN...]`: prove that numbers did not change.

Trains the same short runs with the code of two checkouts, and compares the digests of every stage
of every step and all metrics but times and memory. One line a run; exit code 1 where one differs.
The recipes are those of the old tree, so that only the code differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from tests.chains.differences import RENAMED, first_difference, read_steps, run_directories
from tests.chains.runs import RUNS, Run

_LOG_LINES = 15


@final
class Tree:
    """A checkout, with a process that trains with its code."""

    def __init__(self, name: str, root: Path, recipes: Path, folder: Path) -> None:
        self.name, self._recipes, self._folder = name, recipes, folder
        self._folder.mkdir()
        source = root.resolve() / "src"
        own = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
        own |= {"LUYEN_KEY_FILE": str(folder / "key")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("serve.py"))],
            cwd=folder,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = self._answer()
        if found is None or not Path(found).is_relative_to(source):
            self.close()
            sys.exit(f"{root}: `import luyen` gives {found}, not a package below {source}")

    def folder(self, run: Run) -> Path:
        """Where the tree trains a run."""
        return self._folder / run.name.replace(" ", "_")

    def start(self, run: Run, session: int) -> None:
        """Begin a session of a run."""
        self.folder(run).mkdir(exist_ok=True)
        words = ["train", str(self._recipes / run.recipe), *run.sessions[session]]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"words": words, "folder": str(self.folder(run))}))
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def problem(self, run: Run) -> str | None:
        """Wait for the end of a session; what went wrong, with the end of its log."""
        status = self._answer()
        if status == 0:
            return None
        log = (self.folder(run) / "log.txt").read_text(errors="replace").splitlines()
        said = "\n".join(f"    {line}" for line in log[-_LOG_LINES:])
        return f"the {self.name} tree ended with exit status {status}:\n{said}"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compare(run: Run, old: Tree, new: Tree, renamed: Mapping[str, str] = RENAMED) -> str | None:
    """Train a run with both trees; the first difference, or None."""
    groups = [[old], [new]] if run.is_alone else [[old, new]]
    for session in range(len(run.sessions)):
        for trees in groups:
            for tree in trees:
                tree.start(run, session)
            problems = [tree.problem(run) for tree in trees]
            if any(problems):
                return "\n  ".join(filter(None, problems))
    return _idle(run, old.folder(run), renamed) or first_difference(
        old.folder(run), new.folder(run), renamed
    )


def _idle(run: Run, folder: Path, renamed: Mapping[str, str]) -> str | None:
    """Why the comparison would prove nothing: the run did not do what it is there for."""
    roots = [folder / name for name in run_directories(folder)]
    digests = [line for root in roots for line in read_steps(root / "digests.jsonl").values()]
    weights = {line["stages"]["weights"] for line in digests if line["step"] > 0}
    if len(weights) != run.num_steps:
        return f"{len(weights)} different weights after {run.num_steps} steps in the old tree"
    lines = [line for root in roots for line in read_steps(root / "metrics.jsonl").values()]
    names = (run.shows, renamed.get(run.shows, run.shows))
    seen = [float(line[name]) for line in lines for name in names if name in line]
    if not any(value > run.above for value in seen):
        return f"{run.shows} is above {run.above} in no step of the old tree: {seen}"
    return None


def main(words: Sequence[str]) -> int:
    """Compare two trees; how many runs differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.chains.compare")
    parser.add_argument("old", type=Path, help="checkout of the code before the change")
    parser.add_argument("new", type=Path, help="checkout of the code after it")
    parser.add_argument("runs", nargs="*", help="names of runs; all of them where none is given")
    asked = parser.parse_args(words)
    unknown = set(asked.runs) - {run.name for run in RUNS}
    if unknown:
        parser.error(f"no such run: {sorted(unknown)}; there are {[run.name for run in RUNS]}")
    recipes = asked.old.resolve() / "recipes"
    if not recipes.is_dir():
        parser.error(f"{asked.old}: it has no recipes/; give the root of a checkout")
    runs = [run for run in RUNS if run.name in asked.runs or not asked.runs]
    with tempfile.TemporaryDirectory(prefix="luyen-chains-") as name:
        place = Path(name)
        with (
            Tree("old", asked.old, recipes, place / "old") as old,
            Tree("new", asked.new, recipes, place / "new") as new,
        ):
            return _table(runs, old, new)


def _table(runs: Sequence[Run], old: Tree, new: Tree) -> int:
    begun, num_different = time.monotonic(), 0
    for run in runs:
        since = time.monotonic()
        difference = compare(run, old, new)
        took = f"{time.monotonic() - since:.0f} s"
        num_different += difference is not None
        said = "equal" if difference is None else f"DIFFERENT: {difference}"
        print(f"{run.name:<13}{took:>6}  {said}", flush=True)
    took = f"{time.monotonic() - begun:.0f} s"
    print(f"{len(runs) - num_different} of {len(runs)} runs are equal ({took})")
    return num_different


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
