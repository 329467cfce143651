"""Screens over several files or runs: parity, timeline, comparison of runs."""

import json
from pathlib import Path
from typing import Any

from luyen.base.digests import StepDigest, read_digests, without_checksum
from luyen.base.errors import UserError
from luyen.base.files import read_json
from luyen.base.rundir import step_of
from luyen.base.secrets import masked_tree
from luyen.studio.diff import first_divergence
from luyen.studio.screens.folder import KnownRun, Refusal
from luyen.studio.screens.server_cache import Studio
from luyen.studio.timeline import ProcessSpans, inside, windows
from luyen.studio.timeline_summary import summarise

_POINTS = 400
_MOST_RUNS = 8
_MOST_SPANS = 5000
"""Spans of a lane that are sent, the longest."""
_STEPS_SHOWN = 5
_NO_DIGEST = "No step has a digest in all of these runs."
_SKIPPED = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")


def parity(studio: Studio, run_id: str) -> dict[str, Any]:
    """The gap between sampler and trainer over time, and the tokens with the largest."""
    known = studio.run(run_id)
    table = studio.table(known)
    names = [name for name in table.names if name.startswith("parity/")]
    worst: list[dict[str, Any]] = []
    damage: list[dict[str, str]] = []
    for file in _step_files(known.directory.root / "parity")[-_STEPS_SHOWN:]:
        try:
            page = without_checksum(read_json(file), file, is_demanded=True)
            worst += [{"step": step_of(file.name), **token} for token in page["tokens"][:100]]
        except (UserError, LookupError, TypeError) as error:
            damage.append({"file": file.name, "message": str(error)})
    worst.sort(key=lambda token: -abs(token.get("gap") or 0.0))
    series = {name: table.curve(name, points=_POINTS)._asdict() for name in names}
    return {"series": series, "worst": worst[:200], "damage": damage}


def _step_files(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    files = [f for f in folder.iterdir() if step_of(f.name) is not None and not f.is_symlink()]
    return sorted(files)


def timeline(studio: Studio, run_id: str, *, start: int | None, end: int | None) -> dict[str, Any]:
    """Roles as lanes, with their spans in some steps; the last steps by default."""
    known = studio.run(run_id)
    events = known.directory.events
    if events.is_symlink() or (events.is_dir() and any(f.is_symlink() for f in events.iterdir())):
        raise Refusal(409, "events: a link is not followed", field="events")
    try:
        processes = studio.spans.processes(known)
        steps = sorted({s.step for p in processes for s in p.spans if s.step})
        last = end if end is not None else (steps[-1] if steps else 1)
        first = start if start is not None else max(1, last - _STEPS_SHOWN + 1)
        times = windows(processes, (first, last))
    except UserError as error:
        return {"lanes": [], "versions": [], "idle": [], "origin": None, "steps": None,
                "problem": error.why}  # fmt: skip
    found = inside(processes, times)
    origin = times[0][0]
    work = summarise(found, times)
    return {
        "lanes": [_lane(process, origin) for process in found],
        "versions": _versions(found, origin),
        "idle": [
            {"lane": role.role, "seconds": role.idle_s, "share": 1 - role.busy,
             "waited_for": dict(role.waited_s)}
            for role in work.roles
        ],
        "gaps": [{"start": g.start_s, "seconds": g.seconds, "during": g.during, "step": g.step}
                 for g in work.gaps],
        "phases": dict(work.phases),
        "origin": origin,
        "seconds": work.seconds,
        "steps": [first, last],
        "known_steps": [steps[0], steps[-1]] if steps else None,
        "problem": None,
    }  # fmt: skip


def _lane(process: ProcessSpans, origin: float) -> dict[str, Any]:
    spans = sorted(process.spans, key=lambda span: -span.seconds)[:_MOST_SPANS]
    return {
        "name": process.name,
        "role": process.role,
        "left_out": len(process.spans) - len(spans),
        "spans": [
            {
                "name": span.name,
                "start": span.start - origin,
                "end": span.end - origin,
                "step": span.step,
                "version": span.facts.get("version"),
            }
            for span in sorted(spans, key=lambda span: span.start)
        ],
    }


def _versions(processes: list[ProcessSpans], origin: float) -> list[dict[str, Any]]:
    """When new weights were there: the ends of the updates and publications."""
    found: dict[Any, float] = {}
    for process in processes:
        for span in process.spans:
            if span.name in ("publish", "update") and process.role == "controller":
                version = span.facts.get("version", span.step)
                found[version] = max(found.get(version, 0.0), span.end - origin)
    return [
        {"time": time, "version": version}
        for version, time in sorted(found.items(), key=lambda p: p[1])
    ]


def compare(studio: Studio, ids: list[str]) -> dict[str, Any]:
    """Rows, keys that differ, common metrics, and where the digests of two runs part."""
    if not 2 <= len(ids) <= _MOST_RUNS:
        raise Refusal(422, f"id: compare 2 to {_MOST_RUNS} runs", field="id")
    runs = [studio.run(run_id) for run_id in ids]
    names: set[str] | None = None
    for run in runs:
        mine = set(studio.table(run).names)
        names = mine if names is None else names & mine
    return {
        "runs": [run.row for run in runs],
        "config": _changed_keys(runs),
        "divergence": _divergence(runs),
        "names": sorted(names or ()),
    }


def _changed_keys(runs: list[KnownRun]) -> list[dict[str, Any]]:
    flat: dict[str, dict[str, Any]] = {}
    for run in runs:
        try:
            flat[run.id] = dict(_leaves(masked_tree(run.directory.read_settings()), ""))
        except UserError:
            flat[run.id] = {}
    keys = sorted({key for values in flat.values() for key in values})
    changed: list[dict[str, Any]] = []
    for key in keys:
        values = {run_id: mine.get(key) for run_id, mine in flat.items()}
        texts = {json.dumps(value, sort_keys=True, default=str) for value in values.values()}
        if len(texts) > 1 and key not in _SKIPPED:
            changed.append({"key": key, "values": values})
    return changed


def _leaves(tree: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        return [
            leaf
            for name, inner in tree.items()
            for leaf in _leaves(inner, f"{path}.{name}" if path else str(name))
        ]
    return [(path, tree)]


def _divergence(runs: list[KnownRun]) -> dict[str, Any] | None:
    """The earliest step at which the digests of a run differ from those of the first."""
    chains: list[dict[int, StepDigest]] = []
    for run in runs:
        try:
            chains.append({one.step: one for one in read_digests(run.directory.digests)})
        except UserError as error:
            return {"step": None, "stage": None, "equal_steps": 0,
                    "message": f"{run.row['path']}: {error.why}"}  # fmt: skip
    found: tuple[int, str, str] | None = None
    counts: list[int] = []
    for run, other in zip(runs[1:], chains[1:], strict=True):
        common = sorted(chains[0].keys() & other.keys())
        parting = first_divergence(chains[0], other, common)
        # The digest of step 0 is that of a validation before training.
        counts.append(sum(s > 0 and (parting is None or s < parting.step) for s in common))
        if parting is not None and (found is None or parting.step < found[0]):
            found = parting.step, parting.stage, run.row["path"]
    equal = min(counts)
    if found is None:
        message = f"All {equal} common steps are equal." if equal else _NO_DIGEST
        return {"step": None, "stage": None, "equal_steps": equal, "message": message}
    step, stage, path = found
    message = f"{path} differs from {runs[0].row['path']} in step {step}, first in its {stage}."
    return {"step": step, "stage": stage, "equal_steps": equal, "message": message}
