"""What stands for the code of a rule: every source file that its score can depend on."""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import luyen
from luyen.telemetry.source_files import OURS, source_files


def code_of(rule: Callable[..., Any]) -> list[str] | None:
    """Our version, a hash of our rewards and, for a rule of yours, one of each of its files.

    Its files are its own, those of its package, and those that they import, however deep and
    wherever the import stands. What is installed beside them counts as unchanging. None where the
    rule has no source file.
    """
    file = inspect.getsourcefile(rule)
    if file is None:
        return None
    start = Path(file).resolve()
    found = [luyen.__version__, _rewards_hash()]
    if start.is_relative_to(OURS):
        return found
    files = source_files(start, package=_package_of(rule))
    return found + sorted(f"{f.name}: {sha256(f.read_bytes()).hexdigest()}" for f in files)


@cache
def _rewards_hash() -> str:
    """One hash of everything in this package; it cannot change under a running process."""
    whole = sha256()
    for path in sorted((OURS / "rewards").rglob("*.py")):
        whole.update(sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _package_of(rule: Callable[..., Any]) -> Path | None:
    """The folder of the outermost package that a rule is defined in."""
    outermost = vars(sys.modules[rule.__module__.partition(".")[0]])
    file = outermost.get("__file__")
    return Path(file).resolve().parent if file and "__path__" in outermost else None
