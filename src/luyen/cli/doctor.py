"""`luyen doctor`: the findings about a run as text or JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luyen.base.errors import UserError
from luyen.base.files import plain

if TYPE_CHECKING:
    from luyen.studio.doctor.findings import Diagnosis, DoctorRule
    from luyen.studio.doctor.record import RunRecord

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_MOST_STEPS = 8
"""Steps that a line names; the rest are in the JSON."""


def run_doctor(root: Path, *, as_json: bool) -> int:
    """Print what was found; 1 for errors and warnings, 2 where there is no run, 0 otherwise."""
    from luyen.studio.doctor.diagnose import diagnose
    from luyen.studio.doctor.record import read_run

    try:
        record = read_run(root)
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 2
    findings = diagnose(record)
    if as_json:
        typer.echo(json.dumps(plain(report_json(record, findings)), indent=2, allow_nan=False))
    else:
        for line in report_lines(record, findings):
            typer.echo(line)
    return 1 if any(finding.is_bad for finding in findings) else 0


def report_json(record: "RunRecord", findings: "Sequence[Diagnosis]") -> dict[str, Any]:
    """The whole report as plain data."""
    from luyen.studio.doctor.diagnose import RULES

    steps = [line.step for line in record.steps]
    first = findings[0].symptom.experiment.change if findings else None
    return {
        "ok": not any(finding.is_bad for finding in findings),
        "run": str(record.directory.root),
        "run_id": record.manifest.get("run_id"),
        "last_step": steps[-1] if steps else 0,
        "rules": len(RULES),
        "too_few_steps": {one.id: one.steps for one in unjudged(record)},
        "findings": [finding.as_json() for finding in findings],
        "try_first": first,
    }


def report_lines(record: "RunRecord", findings: "Sequence[Diagnosis]") -> Iterator[str]:
    """The report as text."""
    from luyen.studio.doctor.diagnose import RULES

    last = record.steps[-1].step if record.steps else 0
    total = record.config.trainer.total_training_steps
    yield f"{record.directory.root}: {last} steps{f' of {total}' if total else ''}"
    if not findings:
        yield typer.style(f"No findings ({len(RULES)} rules)", fg="green")
        yield from _unjudged_lines(record)
        return
    counts = Counter(finding.severity for finding in findings)
    yield ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items())
    for finding in findings:
        yield from _one_finding(finding)
    yield ""
    yield f"Try first: {findings[0].symptom.experiment.change}"
    yield from _unjudged_lines(record)


def unjudged(record: "RunRecord") -> "list[DoctorRule]":
    """Rules that need more steps than the run has."""
    from luyen.studio.doctor.diagnose import RULES

    return [one for one in RULES.values() if one.steps > len(record.steps)]


def _unjudged_lines(record: "RunRecord") -> Iterator[str]:
    by_need: dict[int, list[str]] = {}
    for one in unjudged(record):
        by_need.setdefault(one.steps, []).append(one.id)
    for need, names in sorted(by_need.items()):
        yield f"Not judged before step {need}: {', '.join(names)}"


def _one_finding(finding: "Diagnosis") -> Iterator[str]:
    seen = finding.symptom
    label = typer.style(f"{finding.severity} {finding.rule}", fg=_COLOURS[finding.severity])
    yield ""
    yield f"  {label}  {finding.title}"
    yield f"    {seen.says}"
    if seen.steps:
        yield f"    Steps: {_steps(seen.steps)}"
    if seen.rollouts:
        yield f"    Rollouts: {'; '.join(seen.rollouts)}"
    yield f"    Try ({seen.experiment.stage}): {seen.experiment.change}"
    if seen.experiment.then:
        yield f"    Then: {'; '.join(seen.experiment.then)}"


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS]))
    return f"{shown}, ... {steps[-1]}" if len(steps) > _MOST_STEPS else shown


def doctor(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may still go on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with a run, by its files, and what to try next.

    Exit code 1 when there are errors or warnings, 2 when RUN is no run. Nothing is written.
    """
    raise typer.Exit(run_doctor(run, as_json=as_json))
