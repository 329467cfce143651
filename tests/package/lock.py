"""The exact version of every package that Luyen and its developers need: `constraints.txt`.

`make lock` runs it in a new environment. The versions are those that are installed there.
"""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEAD = """\
# The exact versions that the tests are run with. `make lock` writes this file.
"""
_UNPINNED = {"luyen", "pip"}


def closure(package: str, extras: frozenset[str] = frozenset()) -> dict[str, str]:
    """Name -> version of a package and of all that it needs, as installed in this environment."""
    found: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    todo = [(package, extras)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        try:
            about = distribution(name)
        except PackageNotFoundError as error:
            raise SystemExit(f"{name} is not installed here: run `make lock`") from error
        found[canonicalize_name(name)] = about.version.partition("+")[0]
        for text in about.requires or ():
            need = Requirement(text)
            if _applies(need, wanted):
                todo.append((need.name, frozenset(need.extras)))
    return found


def _applies(need: Requirement, extras: frozenset[str]) -> bool:
    if need.marker is None:
        return True
    return any(need.marker.evaluate({"extra": extra}) for extra in extras or {""})


def page(versions: Mapping[str, str]) -> str:
    """The text of the file."""
    kept = sorted((name, version) for name, version in versions.items() if name not in _UNPINNED)
    return HEAD + "".join(f"{name}=={version}\n" for name, version in kept)


def pins(text: str) -> dict[str, str]:
    """Name -> version of the lines of such a file."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    named = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines]
    wrong = [line for line, match in zip(lines, named, strict=True) if match is None]
    if wrong:
        raise ValueError(f"not of the form name==version: {wrong}")
    return {canonicalize_name(match[1]): match[2] for match in named if match is not None}


if __name__ == "__main__":
    sys.stdout.write(page(closure("luyen", frozenset({"dev"}))))
