"""`luyen timeline`: one trace over all processes of a run, and where the time went."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from luyen.base.files import plain, write_whole
from luyen.cli.common import refuse_run_file

if TYPE_CHECKING:
    from luyen.studio.timeline_summary import Gap, RoleWork, TimelineSummary

_NAME = "timeline.json"


def run_timeline(root: Path, *, steps: str | None, out: Path | None, as_json: bool) -> None:
    """Write the trace and print the figures; a UserError where there is nothing to show."""
    from luyen.studio.timeline import inside, parse_steps, read_processes, windows
    from luyen.studio.timeline_summary import summarise, trace_of

    wanted = None if steps is None else parse_steps(steps)
    processes = read_processes(root)
    times = windows(processes, wanted)
    shown = inside(processes, times)
    path = root / _NAME if out is None else out
    write_whole(path, json.dumps(plain(trace_of(shown)), allow_nan=False))
    found = summarise(shown, times)
    if as_json:
        page = {**found.as_json(), "run": str(root), "trace": str(path)}
        typer.echo(json.dumps(plain(page), indent=2, allow_nan=False))
        return
    for line in lines(found):
        typer.echo(line)
    typer.echo(f"\nwrote {path}: it opens in https://ui.perfetto.dev")


def lines(found: "TimelineSummary") -> Iterator[str]:
    """The summary as text."""
    first, last = found.steps
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"{which}, {found.seconds:.3g} s"
    yield ""
    yield f"{'role':<12}{'processes':>10}{'busy':>8}{'idle':>11}   waited for"
    yield from map(_role_line, found.roles)
    yield ""
    spent = (f"{name} {taken:.3g} s" for name, taken in found.phases.items())
    yield f"Phases of the loop: {', '.join(spent)}"
    if found.gaps:
        yield "Longest gaps, in which only the controller worked:"
        yield from map(_gap_line, found.gaps)
    if found.clock_error_s is not None:
        bound = found.clock_error_s * 1000
        yield f"Times of other processes are right to {bound:.2g} ms"


def _role_line(work: "RoleWork") -> str:
    waits = [f"{name} {spent:.3g} s" for name, spent in work.waited_s.items() if spent > 0]
    columns = f"{work.role:<12}{work.processes:>10}{work.busy:>8.0%}{work.idle_s:>9.3g} s"
    return f"{columns}   {', '.join(waits)}".rstrip()


def _gap_line(gap: "Gap") -> str:
    where = "" if gap.step is None else f", step {gap.step}"
    return f"  {gap.seconds:.3g} s at {gap.start_s:.3g} s: {gap.during}{where}"


def timeline(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may still go on.")],
    steps: Annotated[
        str | None, typer.Option(help="Steps to look at, such as 3-5; without it, all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The trace; by default RUN/timeline.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Write one trace over all processes of a run, and say who waited for whom.

    Perfetto opens the trace. Nothing else is written.
    """
    refuse_run_file(out)
    run_timeline(run, steps=steps, out=out, as_json=as_json)
