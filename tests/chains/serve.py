"""A process of one tree, which makes a child for every `luyen train`: a run takes a moment.

It is started as a file, with the tree's `src` as PYTHONPATH, and knows nothing of the tree but the
command `python -m luyen`. The first line that it writes is the path of the package `luyen` that it
has found. Then it reads a job a line from its input, as JSON, and answers with the exit status.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

_PACKAGES = ("luyen", "transformers", "matplotlib", "peft", "pyarrow")
"""Packages that take the time of a start; what they import comes along."""
_NAMES = "modules.json"


def main() -> None:
    """Serve until the input ends."""
    found = importlib.util.find_spec("luyen")
    _answer(found.origin if found is not None else None)
    known: set[str] = set()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _train(job)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        names = Path(job["folder"]) / _NAMES
        if names.is_file():
            known = _import_new(json.loads(names.read_text()), known)
        _answer(status)


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _import_new(names: list[str], known: set[str]) -> set[str]:
    """Import what a child had to import, so that the next one finds it there."""
    for name in names:
        if name not in known and name.partition(".")[0] in _PACKAGES:
            # Some packages register names that are no modules of their own.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    return known.union(names)


def _train(job: dict[str, Any]) -> None:
    """The life of a child: `python -m luyen WORDS` in the folder of the job."""
    status: Any = 70
    try:
        folder = Path(job["folder"])
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        sys.argv = ["luyen", *job["words"]]
        runpy.run_module("luyen", run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001 - whatever it is, it goes to the log
        traceback.print_exc()
    finally:
        if status == 0:
            names = [name for name in sys.modules if not name.endswith("__main__")]
            (Path(job["folder"]) / _NAMES).write_text(json.dumps(names))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
