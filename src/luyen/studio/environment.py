"""What of the surroundings of a run is not as it was when the run began."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.load import load
from luyen.config.named_files import named_fingerprints
from luyen.config.parse import parse
from luyen.config.schema.run import RunConfig
from luyen.studio.inputs import ChangedInput, changed_facts
from luyen.telemetry.manifest import collect, installed_packages, settings_of

_LATER = ("threads", "datasets", "seeds")
"""What is only known when the rows are read and torch is loaded."""


def read_run_config(run: RunDirectory) -> RunConfig:
    """The run's configuration; a UserError when it is damaged or has a key that is now unknown."""
    run.read_config()
    tree = load([run.config], [])
    parsed = parse(tree)
    for problem in (*tree.problems, *parsed.problems):
        if problem.severity == "error":
            raise UserError(problem.field, problem.value, problem.why, problem.fix)
    return parsed.config


def changed_surroundings(
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
