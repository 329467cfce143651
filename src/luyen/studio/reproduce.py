"""Run a recorded run again in a new process and compare digests; what changed since then.

Nothing here loads torch; the process that trains does. It gets the environment variables and the
number of threads that the first run had, since both must be set before a library is loaded.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

import yaml

from luyen.base.digests import StepDigest
from luyen.base.errors import UserError
from luyen.base.files import write_whole
from luyen.base.input_files import parse_json
from luyen.base.rundir import RunDirectory
from luyen.config.loader.load import load
from luyen.config.loader.parse import parse
from luyen.config.named_files import named_fingerprints
from luyen.config.schema.run import RunConfig
from luyen.sandbox.child.usage import kill_process_tree
from luyen.studio.inputs import ChangedInput, changed_facts
from luyen.telemetry.manifest import SETTINGS, collect, installed_packages, settings_of

OVERRIDDEN_KEYS = ("trainer.logger", "trainer.profile.steps", "settings.OMP_NUM_THREADS")
"""Inputs that a rerun overrides; none of them changes a number."""
_PLACES = ("_VISIBLE_DEVICES", "_HOME", "_PATH", "_DIR")
"""Suffixes of variables with machine-specific paths or devices: these are not restored."""
_THREADS = "OMP_NUM_THREADS"
_STOP_TIMEOUT_S = 10.0
_SHOWN = 8
"""Last lines of a rerun that failed."""


def folder_of(run: RunDirectory) -> Path:
    """The working directory of the run if it exists here, else the current one."""
    named = run.read_manifest().get("folder")
    return Path(named) if named and Path(named).is_dir() else Path.cwd()


def environment_of(manifest: Mapping[str, Any], now: Mapping[str, str]) -> dict[str, str]:
    """The current environment with the settings and threads of the run.

    Example:
        >>> manifest = {"settings": {"MKL_CBWR": "AVX2"}, "threads": {"torch": 2}}
        >>> environment_of(manifest, {"MKL_CBWR": "AVX512", "HOME": "/home/me"})
        {'HOME': '/home/me', 'MKL_CBWR': 'AVX2', 'OMP_NUM_THREADS': '2'}
    """
    kept = {name: v for name, v in now.items() if not name.startswith(SETTINGS) or _is_place(name)}
    given: Mapping[str, str] = manifest.get("settings") or {}
    ours = {name: v for name, v in given.items() if name.startswith(SETTINGS)}
    made = kept | {name: value for name, value in ours.items() if not _is_place(name)}
    threads = (manifest.get("threads") or {}).get("torch")
    if threads is not None:
        made.setdefault(_THREADS, str(threads))
    return made


def _is_place(name: str) -> bool:
    return name.endswith(_PLACES)


def changed_part(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that differs from the defaults.

    It is equivalent to the whole, and some rules of the check depend on which keys are written.

    Example:
        >>> changed_part({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 0}, "d": 3})
        {'a': {'c': 2}}
    """
    changed: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            inner = changed_part(value, default)
            changed |= {name: inner} if inner else {}
        elif name not in defaults or value != default:
            changed[name] = value
    return changed


def _defaults() -> dict[str, Any]:
    return RunConfig().model_dump(mode="json")


@final
class Rerun:
    """Context manager that repeats a run in a new directory; exiting stops the process."""

    def __init__(self, original: RunDirectory, into: Path) -> None:
        """Nothing is started yet; a UserError where `into` exists."""
        if into.exists():
            fix = "remove it, or give another with --into"
            raise UserError("--into", str(into), "it exists, and nothing is written over", fix)
        if not into.parent.name:
            fix = "give a folder below another one"
            raise UserError("--into", str(into), "a run directory has two names", fix)
        self.directory = RunDirectory(into)
        self._original = original
        self._config = into.with_name(f"{into.name}.yaml")
        self._log = into.with_name(f"{into.name}.log")
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        run, into = self._original, self.directory.root
        into.parent.mkdir(parents=True, exist_ok=True)
        keys = {
            "trainer.default_local_dir": str(into.parent.parent),
            "trainer.project_name": into.parent.name,
            "trainer.experiment_name": into.name,
            "trainer.logger": ["jsonl"],
            "trainer.profile.steps": [],
        }
        words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        text = yaml.safe_dump(changed_part(run.read_settings(), _defaults()))
        write_whole(self._config, text)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # Without -P the working directory would come first in sys.path.
                [sys.executable, "-P", "-m", "luyen", "train", str(self._config), *words],
                cwd=folder_of(run),
                env=environment_of(run.read_manifest(), os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.unlink(missing_ok=True)
        self._config.unlink(missing_ok=True)

    @property
    def has_ended(self) -> bool:
        """Whether the process is over."""
        return self._process is None or self._process.poll() is not None

    def new_steps(self) -> list[StepDigest]:
        """Digests that were written since the last call, in order."""
        if not self.directory.digests.is_file():
            return []
        with self.directory.digests.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        lines = [parse_json(line) for line in whole.splitlines()]
        names = ("step", "stages", "previous", "chain")
        return [StepDigest(**{name: line[name] for name in names}) for line in lines]

    def failure(self) -> UserError:
        """The error of a process that ended before the last step of the original run."""
        code = None if self._process is None else self._process.poll()
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_SHOWN:]
        why = f"the rerun ended with exit code {code}: {' | '.join(lines) or 'it said nothing'}"
        fix = "fix the reported error, and run the command again"
        return UserError("run", str(self._original.root), why, fix)

    def stop(self) -> None:
        """End the process: two SIGINT, then SIGKILL after a timeout."""
        process = self._process
        if process is None:
            return
        for _ in range(2):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill_process_tree(process.pid)
            process.wait()


# Changes of the environment since the run began.

_LATER = ("threads", "datasets", "seeds")
"""Blocks of the manifest that need torch or the rows; not compared."""


def read_run_config(run: RunDirectory) -> RunConfig:
    """The run's configuration; a UserError when it is damaged or has a key that is now unknown."""
    run.read_config()
    tree = load([run.config], [])
    parsed = parse(tree)
    for problem in (*tree.problems, *parsed.problems):
        if problem.severity == "error":
            raise UserError(problem.field, problem.value, problem.why, problem.fix)
    return parsed.config


def changed_environment(
    run: RunDirectory, *, folder: Path, environment: Mapping[str, str] | None = None
) -> list[ChangedInput]:
    """Versions, code, machine, settings and content of named files that differ now.

    `folder` is where relative paths begin, and `environment` what a rerun would be given.
    Rows, threads and GPUs are not looked at: they take torch or a tokenizer to be known.
    """
    before = run.read_manifest()
    files = named_fingerprints(read_run_config(run), folder=folder)
    now = collect(seeds={}, datasets={}, files=files, folder=folder).as_json()
    now["settings"] = settings_of(os.environ if environment is None else environment)
    now["packages"] = _installed(before.get("packages") or {})
    return changed_facts(_comparable(before), _comparable(now))


def _installed(packages: Mapping[str, str]) -> dict[str, str]:
    """The versions of these packages that are installed now."""
    found = installed_packages()
    return {name: found[name][0] if name in found else "not installed" for name in packages}


def _comparable(manifest: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in manifest.items() if name not in _LATER}
    hardware = manifest.get("hardware")
    if hardware is not None:
        kept["hardware"] = {name: v for name, v in hardware.items() if name != "gpus"}
    return kept
