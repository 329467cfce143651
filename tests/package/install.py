"""Installs the wheel and the sdist into an environment of its own, uses it, and uninstalls it.

`make test-package` runs it. It fetches what the package needs, so it is no part of `make test`:

    python -m tests.package.install [--constraints FILE] [--keep FOLDER]

It prints one line for each step with its time, and ends with 1 at the first that fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.architecture.tree import ROOT
from tests.package.distributions import build, copy_tree, unpack

TORCH = "torch==2.13.0"
EXTRAS = {
    "serve": "fastapi",
    "datasets": "datasets",
    "math": "math_verify",
    "gguf": "gguf",
    "tools": "mcp",
}
"""Extras that are installed together, and the module that each brings. The others are large, or
pin what these need."""
NEWER = ("3.12", "3.13", "3.14")
"""Versions of Python for which every dependency must be a wheel."""


def call(*words: str | Path, cwd: Path, timeout_s: float = 1800) -> str:
    """Output of a command that must end with 0, in an environment without paths of this one."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{said}")
    return done.stdout


def timed(title: str, act: Callable[[], str | None]) -> None:
    """Run one step, and print what came of it and how long it took."""
    start = time.monotonic()
    said = act()
    print(f"{title}: {said or 'passed'} ({time.monotonic() - start:.0f} s)", flush=True)


class Environment:
    """A new virtual environment, and a folder outside of the repository to work in."""

    def __init__(self, folder: Path, constraints: Path | None) -> None:
        self.place, self.work = folder / "venv", folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self._limits = ["-c", str(constraints)] if constraints is not None else []
        venv.create(self.place, with_pip=True)

    def pip(self, *words: str | Path) -> str:
        """Call pip of the environment."""
        return call(self.place / "bin" / "python", "-m", "pip", "-q", *words, cwd=self.work)

    def install(self, *what: str | Path) -> None:
        """Install packages at the versions of the constraints."""
        self.pip("install", "--no-compile", *self._limits, *what)

    def luyen(self, *words: str) -> str:
        """Call the installed command in the folder."""
        return call(self.place / "bin" / "luyen", *words, cwd=self.work)

    def python(self, code: str) -> str:
        """Run code in the folder."""
        return call(self.place / "bin" / "python", "-c", code, cwd=self.work)

    def files(self) -> set[str]:
        """Files and folders of the environment."""
        return {str(path.relative_to(self.place)) for path in self.place.rglob("*")}


def trained(home: Environment) -> str:
    """The built-in quickstart from the wheel alone: check, two steps, report."""
    place = home.python("import luyen; print(luyen.__file__)").strip()
    if str(home.place) not in place:
        raise SystemExit(f"luyen is imported from {place}, not from the wheel")
    keys = ("trainer.total_training_steps=2", "trainer.experiment_name=first", "trainer.seed=0")
    home.luyen("train", *keys)
    run = home.work / "runs" / "luyen" / "first"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    if steps[-1] != 2:
        raise SystemExit(f"steps in metrics.jsonl: {steps}")
    home.luyen("report", str(run))
    return f"trained {steps[-1]} steps, wrote {(run / 'report.html').stat().st_size} bytes"


def removed(home: Environment, before: Iterable[str]) -> str:
    """Uninstall; nothing of the package may be left."""
    home.pip("uninstall", "-y", "luyen")
    left = sorted(name for name in home.files() - set(before) if "luyen" in name)
    if left:
        raise SystemExit(f"left behind by pip uninstall: {left[:10]}")
    return "nothing is left"


def resolved(home: Environment, wheel: Path, version: str) -> str:
    """Whether pip finds a wheel of every dependency for a version of Python; nothing is kept."""
    report = home.work / f"resolved-{version}.json"
    words = ("--dry-run", "--only-binary=:all:", "--ignore-installed", "--python-version", version)
    home.pip("install", *words, "--target", "unused", "--report", report, wheel)
    chosen = json.loads(report.read_text())["install"]
    names = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in chosen}
    return f"{len(names)} wheels, torch {names['torch']}, transformers {names['transformers']}"


def run(folder: Path, constraints: Path | None) -> None:
    """Every step, in order."""
    sdist = build("sdist", copy_tree(folder / "tree"), folder / "dist")
    wheel = build("wheel", unpack(sdist, folder / "unpacked"), folder / "dist")
    print(f"{sdist.name}: {sdist.stat().st_size} bytes, {wheel.name}: {wheel.stat().st_size} bytes")
    home = Environment(folder, constraints)
    timed("torch", lambda: home.install(TORCH))
    before = home.files()
    timed("wheel without extras", lambda: home.install(wheel))
    timed("pip check", lambda: home.pip("check").strip())
    timed("quickstart outside of the repository", lambda: trained(home))
    timed("uninstall", lambda: removed(home, before))
    extras = ",".join(EXTRAS)
    timed(f"wheel with {extras}", lambda: home.install(f"{wheel}[{extras}]"))
    modules = ", ".join(EXTRAS.values())
    timed("modules of the extras", lambda: home.python(f"import {modules}").strip())
    timed("uninstall", lambda: removed(home, before))
    timed("sdist", lambda: home.install(sdist))
    timed("command of the sdist", lambda: home.luyen("version").strip())
    timed("uninstall", lambda: removed(home, before))
    for version in NEWER:
        timed(f"dependencies for Python {version}", lambda v=version: resolved(home, wheel, v))


def _whole(path: str) -> Path:
    """A path from the root: pip is called in another folder."""
    return Path(path).resolve()


def main() -> None:
    """Read the arguments, and run in a folder that is removed at the end unless it was given."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--constraints", type=_whole, default=ROOT / "constraints.txt")
    words.add_argument("--keep", type=_whole, help="a new folder to work in, which is kept")
    given = words.parse_args()
    if given.keep is not None:
        run(given.keep, given.constraints)
        return
    with tempfile.TemporaryDirectory(prefix="luyen-package-") as folder:
        run(Path(folder), given.constraints)


if __name__ == "__main__":
    sys.exit(main())
