"""Smaller screens of a run: names of metrics, faults and resumptions, plan, log."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luyen.base.digests import StepDigest, read_digests
from luyen.base.errors import UserError
from luyen.base.files import read_entries
from luyen.base.secrets import masked, masked_tree
from luyen.base.system import read_at
from luyen.studio.metrics_file import open_records
from luyen.studio.screens.folder import KnownRun
from luyen.studio.screens.server_cache import Studio
from luyen.telemetry.metrics import CATALOG
from luyen.telemetry.summary import NAME as NOTES

_MOST_ENTRIES = 2000


def metric_names(studio: Studio, run_id: str) -> dict[str, Any]:
    """Every metric of the run, with its meaning."""
    import luyen.train.metric_names  # noqa: F401 - declares the metrics

    known = studio.run(run_id)
    table = studio.table(known)
    names: list[dict[str, Any]] = []
    for name in table.names:
        declared = CATALOG.find(name)
        entry = {"name": name, "category": name.partition("/")[0], "unit": "", "help": ""}
        if declared is not None:
            entry |= {"unit": declared.unit, "help": declared.doc}
        names.append(entry)
    return {
        "names": names,
        "steps": table.last_step,
        "is_whole": table.is_whole,
        "damaged_lines": table.damaged_lines,
    }


def faults(studio: Studio, run_id: str) -> dict[str, Any]:
    """Attempts, resumptions, notes, the chain of digests, and what is broken."""
    run = studio.run(run_id).directory
    broken: list[dict[str, str]] = []

    def read(path: Path, make: Callable[[Path], list[Any]]) -> list[Any]:
        try:
            return make(path)
        except (UserError, OSError, ValueError, LookupError, TypeError) as error:
            why = error.why if isinstance(error, UserError) else str(error)
            broken.append({"file": path.name, "message": why})
            return []

    resumed = read(run.resumptions, lambda _: run.read_resumptions())
    chain = _chain(read(run.digests, read_digests))
    bad = [entry for entry in chain if not entry["ok"]]
    notes_file = run.root / NOTES
    notes = read(notes_file, read_entries) if notes_file.is_file() else []
    return {
        "attempts": 1 + len(resumed),
        "resumptions": [_resumption(entry) for entry in resumed[-_MOST_ENTRIES:]],
        "notes": [
            {"time": note.get("time"), "note": masked(str(note.get("note", "")))}
            for note in notes[-_MOST_ENTRIES:]
            if note is not None
        ],
        "digests": [*bad[:100], *(e for e in chain[-_MOST_ENTRIES:] if e["ok"])],
        "steps_with_digest": len(chain),
        "broken": broken,
        "hangs": sorted(path.name for path in run.events.glob("hang-*.txt"))[:100],
    }


def _resumption(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {name: entry.get(name) for name in ("time", "changed", "is_config_new")}
    return {**kept, "step": entry.get("checkpoint")}


def _chain(digests: list[StepDigest]) -> list[dict[str, Any]]:
    """Every step with its chain, and whether it continues that of the step before."""
    return [
        {"step": now.step, "chain": now.chain, "ok": last is None or last.chain == now.previous}
        for last, now in zip([None, *digests], digests, strict=False)
    ]


def plan(studio: Studio, run_id: str) -> dict[str, Any]:
    """The resolved configuration with the source of each key, the memory plan and findings."""
    # Imported here: the schema of the configuration takes a while, and other screens need none.
    from luyen.config.check import check_tree
    from luyen.config.fields import all_fields
    from luyen.config.loader.load import load
    from luyen.config.rules.rule import value_at

    known = studio.run(run_id)
    run = known.directory
    try:
        text = _masked_yaml(known)
        origins: dict[str, str] = run.read_provenance()
    except UserError as error:
        gone = finding_json("error", error.field, error.why, error.fix)
        return {"yaml": "", "keys": [], "memory": [], "findings": [gone]}
    tree = load([run.config], [], reads_environment=False)
    report = check_tree(tree, starts_a_run=False)
    keys = [
        {
            "key": path,
            "value": masked_tree(value_at(report.config, path), path.rpartition(".")[2]),
            "source": origins.get(path) or _below(origins, path),
            "help": info.doc,
            "default": info.default,
        }
        for path, info in all_fields().items()
    ]
    return {
        "yaml": text,
        "keys": keys,
        "memory": memory_bars(report.plan.memory),
        "findings": [problem_json(one) for one in report.problems],
    }


def finding_json(
    level: str, key: str | None, message: str, fix: str | None, *, rule: str = ""
) -> dict[str, Any]:
    """A finding about a configuration."""
    return {"rule": rule, "level": level, "key": key, "message": message, "fix": fix}


def problem_json(problem: Any) -> dict[str, Any]:
    """A problem of a configuration as the page shows it."""
    made = finding_json(
        problem.severity, problem.field, problem.why, problem.fix or None, rule=problem.id
    )
    return {**made, "value": problem.as_json()["value"], "origin": str(problem.origin)}


def memory_bars(memory: Any) -> list[dict[str, Any]]:
    """The phases of a memory plan, a bar each; empty where the model is not on this machine."""
    if memory is None:
        return []
    return [
        {
            "device": phase.name,
            "parts": [{"name": name, "bytes": size} for name, size in phase.parts.items()],
            "total": phase.total,
            "capacity": memory.device_bytes,
        }
        for phase in memory.phases
    ]


def _below(origins: dict[str, str], path: str) -> str | None:
    below = [where for key, where in origins.items() if key.startswith(f"{path}.")]
    return ", ".join(dict.fromkeys(below)) or None


def _masked_yaml(known: KnownRun) -> str:
    """The configuration as YAML, values of secrets masked."""
    import yaml

    return yaml.safe_dump(masked_tree(known.directory.read_settings()), sort_keys=False)


def log_lines(path: Path, tail: int) -> list[str]:
    """The last lines of a text file; empty where there is none."""
    try:
        handle = open_records(path)
    except OSError:
        return []
    try:
        size = os.fstat(handle).st_size
        data = read_at(handle, min(size, 512 * tail, 4 * 2**20), max(0, size - 512 * tail))
    finally:
        os.close(handle)
    # A progress display rewrites its line with carriage returns: the last writing counts.
    lines = data.decode(errors="replace").split("\n")
    return [masked(line.rstrip("\r").rpartition("\r")[2]) for line in lines][-tail:]


def run_log(studio: Studio, run_id: str, *, tail: int) -> dict[str, Any]:
    """The notes of a run as lines of a log."""
    notes = faults(studio, run_id)["notes"]
    lines = [f"{note['time']} {note['note']}" for note in notes][-tail:]
    return {"lines": lines, "source": "notes"}
