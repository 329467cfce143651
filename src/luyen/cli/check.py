"""`luyen check`: find every problem of a configuration; the report as text or JSON."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from luyen.base.errors import UserError, printable, shortened
from luyen.base.input_files import is_file
from luyen.base.secrets import masked, masked_tree
from luyen.config.check import Report, batch_lines, offline_lines, unchecked_parts
from luyen.config.check import check as check_config
from luyen.config.explain import show_value
from luyen.config.loader.parse import masked_values
from luyen.config.machine import Machine, this_machine
from luyen.config.memory import MemoryPlan
from luyen.config.model_folder.config_json import unplanned
from luyen.config.pipeline import Pipeline, check_pipeline, is_pipeline, read_pipeline
from luyen.config.problem import Problem
from luyen.config.schema.block import derived_in_force
from luyen.config.simulation.scale_report import scale_lines, scales_data
from luyen.config.simulation.scales import Scenario, planned_scales
from luyen.data.first_rows import first_row_error
from luyen.runtime.ray.pools import Device, DevicePool, PoolFacts, pools_of
from luyen.sandbox.launch import missing

_GIB = 1024**3
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def run_check(words: Sequence[str], *, as_json: bool, device_memory_gb: float | None) -> int:
    """Print the report; 1 when there are errors, 0 otherwise."""
    files, overrides = split_words(words)
    machine = this_machine()
    if device_memory_gb is not None:
        machine = _with_gpus(machine, device_memory_gb)
    if is_pipeline(files):
        return check_stages(read_pipeline(files, overrides), machine, as_json=as_json)
    report = check_config(
        files, overrides, machine=machine, missing_promises=missing, row_error=first_row_error
    )
    if as_json:
        typer.echo(json.dumps(without_odd_values(report_json(report)), indent=2, allow_nan=False))
    else:
        for line in report_lines(report, [str(f) for f in files], machine):
            typer.echo(line)
    return 0 if report.is_sound else 1


def check_stages(pipeline: Pipeline, machine: Machine, *, as_json: bool) -> int:
    """Print the report of every stage of a pipeline; 1 when one of them has errors."""
    stages = check_pipeline(
        pipeline, machine=machine, missing_promises=missing, row_error=first_row_error
    )
    is_sound = not pipeline.problems and all(stage.report.is_sound for stage in stages)
    if as_json:
        page = {
            "ok": is_sound,
            "problems": [problem.as_json() for problem in pipeline.problems],
            "stages": [{"name": one.name, **report_json(one.report)} for one in stages],
        }
        typer.echo(json.dumps(without_odd_values(page), indent=2, allow_nan=False))
        return 0 if is_sound else 1
    for problem in pipeline.problems:
        for line in _one_problem(problem):
            typer.echo(line)
    for number, one in enumerate(stages, 1):
        typer.echo(f"{'' if number == 1 else chr(10)}Stage {number} of {len(stages)}: {one.name}")
        for line in report_lines(one.report, [pipeline.source], machine):
            typer.echo(line)
    return 0 if is_sound else 1


def print_scales(scenario: Scenario, *, simulates: bool, as_json: bool) -> int:
    """Print the plans of `luyen plan`; 1 where one of them is refused or does not fit."""
    scales = list(planned_scales(scenario, simulates=simulates))
    if as_json:
        page = scales_data(scales, scenario, simulates=simulates)
        typer.echo(json.dumps(without_odd_values(page), indent=2, allow_nan=False))
    else:
        wrong = next((scale.report for scale in scales if scale.report.problems), None)
        if wrong is not None:
            for line in (*problem_lines(wrong, [str(file) for file in scenario.files]), ""):
                typer.echo(line)
        for line in scale_lines(scales, scenario, simulates=simulates):
            typer.echo(line)
    return 0 if all(scale.is_sound for scale in scales) else 1


def split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files, and key=value or ~key overrides; a file may have an equals sign in its name."""
    overrides = [w for w in words if ("=" in w or _takes_back(w)) and not is_file(w)]
    for word in overrides:
        _refuse_other_encodings(word)
    return [Path(word) for word in words if word not in overrides], overrides


def _takes_back(word: str) -> bool:
    """Whether it is Hydra's `~key`, and not a path in a home directory."""
    return word.startswith("~") and word != "~" and "/" not in word


def _refuse_other_encodings(word: str) -> None:
    """A UserError for a value that is not valid UTF-8, which files of a run cannot hold."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        key, _, value = word.partition("=")
        shown = value.encode(errors="backslashreplace").decode()
        why, fix = "it is no UTF-8", "rename the path, or run in a UTF-8 locale (LANG=C.UTF-8)"
        raise UserError(key, shown, why, fix) from error


def _with_gpus(machine: Machine, gib: float) -> Machine:
    """This machine with 64 GPUs of that memory: enough for any planned number of GPUs."""
    if not (gib > 0 and math.isfinite(gib)):
        why = "a device has some memory, and not without end"
        raise UserError("--device-memory-gb", gib, why, "give GiB, such as 80")
    return replace(machine, gpu_bytes=(int(gib * _GIB),) * 64, is_assumed=True)


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as plain data."""
    plan = report.plan
    memory = None
    if plan.memory is not None:
        phases = {phase.name: {**phase.parts, "total": phase.total} for phase in plan.memory.phases}
        memory = {
            "phases": phases,
            "peak": plan.memory.peak.name,
            "device_bytes": plan.memory.device_bytes,
            "fits": plan.memory.fits,
        }
    return {
        "ok": report.is_sound,
        "problems": [problem.as_json() for problem in report.problems],
        "plan": {
            "batch": asdict(plan.batch),
            "derived": derived_in_force(report.config),
            "placement": asdict(plan.where),
            "pools": [asdict(pool) for pool in _pools(report)],
            "model": asdict(plan.shape) if plan.shape else None,
            "memory": memory,
        },
        "not_tried": [{"key": key, "why": words} for key, words in unchecked_parts(report.config)],
        "config": masked_values(report.config),
    }


def without_odd_values(value: Any) -> Any:
    """The value as JSON; values without a JSON form (NaN, a set, bytes) become text."""
    match value:
        case dict():
            entries = cast(dict[Any, Any], value)
            return {str(name): without_odd_values(inner) for name, inner in entries.items()}
        case list() | tuple():
            return [without_odd_values(inner) for inner in cast(Sequence[Any], value)]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case _:
            return str(value)


def report_lines(report: Report, files: Sequence[str], machine: Machine) -> Iterator[str]:
    """The whole report as text; without the plan where a file could not be read."""
    yield from problem_lines(report, files)
    if report.is_whole:
        yield ""
        yield from _plan_lines(report, machine)
        yield from _unrun_lines(report)


def _unrun_lines(report: Report) -> Iterator[str]:
    """The parts that the check could not run, if there are any."""
    left = list(unchecked_parts(report.config))
    if left:
        yield "Not tried: what is wrong here, only training shows"
    for key, words in left:
        yield f"  {printable(key)}: {printable(masked(words))}"


def problem_lines(report: Report, files: Sequence[str]) -> Iterator[str]:
    """The problems without the plan, for a run that does not start."""
    yield _headline(report, files)
    for problem in report.problems:
        yield from _one_problem(problem)


def _headline(report: Report, files: Sequence[str]) -> str:
    where = printable(", ".join(files)) or "the command line"
    if not report.problems:
        return typer.style(f"No problems in {where}", fg="green")
    counts = Counter(problem.severity for problem in report.problems)
    parts = [f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items()]
    return f"{', '.join(parts)} in {where}"


def _one_problem(problem: Problem) -> Iterator[str]:
    label = typer.style(f"{problem.severity} {problem.id}", fg=_COLOURS[problem.severity])
    is_file = problem.field == problem.origin.source
    value = masked_tree(problem.value, problem.field)
    value = printable(str(shortened(show_value(value))))
    what = f"{printable(problem.field)} = {value}   ({printable(str(problem.origin))})"
    yield ""
    yield f"  {label}  {printable(str(problem.origin)) if is_file else what}"
    yield f"    {printable(masked(problem.why))}"
    if problem.fix:
        yield f"    Fix: {printable(problem.fix)}"


def _pools(report: Report) -> list[DevicePool]:
    """Device pools that are requested from a cluster; none for a local run."""
    where = report.plan.where
    return pools_of(PoolFacts.of(report.config, where)) if where.runtime == "ray" else []


def _plan_lines(report: Report, machine: Machine) -> Iterator[str]:
    plan, where = report.plan, report.plan.where
    workers = f"{where.world_size} device{'s' if where.world_size > 1 else ''}"
    yield f"Plan: {where.runtime} runtime, {workers} of {where.device} (here: {machine.words()})"
    lines = batch_lines if report.config.trainer.stage == "rl" else offline_lines
    for label, words in lines(plan.batch):
        yield f"  {label:16s} {words}"
    derived = derived_in_force(report.config)
    if derived:
        yield "Not set, and derived from other keys"
    for path, value in derived.items():
        yield f"  {path} = {show_value(value)}"
    yield "Roles"
    for role in where.roles:
        yield f"  {role.name:16s} {role.engine}; {role.place}"
    yield from _pool_lines(_pools(report), "cuda" if where.device == "cuda" else "cpu")
    if plan.shape is None or plan.memory is None:
        yield f"Memory: unknown, {unplanned(report.config.actor_rollout_ref.model)}"
        return
    yield f"Memory on one device, for a model of {_count(plan.shape.parameters())} parameters"
    yield from _memory_lines(plan.memory)


def _pool_lines(pools: Sequence[DevicePool], device: Device) -> Iterator[str]:
    if pools:
        unit = "GPUs" if device == "cuda" else "cores"
        yield f"Pools: {sum(pool.devices for pool in pools)} {unit} of the cluster in all"
    for pool in pools:
        yield f"  {pool.words(device)}"


def _memory_lines(memory: MemoryPlan) -> Iterator[str]:
    for phase in memory.phases:
        parts = ", ".join(f"{name} {_size(part)}" for name, part in phase.parts.items())
        yield f"  {phase.name:16s} {_size(phase.total):>9s}  = {parts}"
    share = 100 * memory.peak.total / memory.device_bytes
    verdict = "fits" if memory.fits else "does NOT fit"
    yield f"  {verdict}: {memory.peak.name} takes {share:.1f} % of {_size(memory.device_bytes)}"


def _size(count: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", 1024**2)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def check(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides.",
            metavar="CONFIG... [KEY=VALUE]...",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    device_memory_gb: Annotated[
        float | None,
        typer.Option(help="Plan for a GPU of this many GiB instead of this machine's."),
    ] = None,
) -> None:
    """Find every problem of a configuration, then show the plan it describes.

    Exit code 1 when there are errors. Nothing is written and no model is loaded.
    """

    raise typer.Exit(run_check(config, as_json=as_json, device_memory_gb=device_memory_gb))
