"""`luyen eval`: a checkpoint measured on validation rows, or two compared."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.files import json_page, plain, write_whole
from luyen.cli.eval_request import EvalRequest
from luyen.cli.quiet import prepare
from luyen.config.trust import require_trusted_files, require_trusted_path

if TYPE_CHECKING:
    from luyen.studio.evaluation.compare import Comparison
    from luyen.studio.evaluation.samples import Sample
    from luyen.studio.evaluation.summary import SourceSummary
    from luyen.train.checkpointed import Opened
    from luyen.train.measure import Measured


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One policy, measured or read from a file.

    Example:
        >>> Evaluated(name="a.jsonl", rows=(), samples=(), summaries=(), about={}).page(None)
        {'summary': [], 'rollouts': []}
    """

    name: str
    """Where it came from."""
    rows: "Sequence[Mapping[str, Any]]"
    """Every rollout."""
    samples: "Sequence[Sample]"
    """The same, as statistics see it."""
    summaries: "Sequence[SourceSummary]"
    """What it says for each data source."""
    about: Mapping[str, Any]
    """What else a report tells of it."""

    def page(self, shown: int | None) -> dict[str, Any]:
        """The report as plain data, with the rollouts of the first `shown` prompts."""
        prompts = list(dict.fromkeys(sample.prompt for sample in self.samples))[:shown]
        kept = set(prompts)
        pairs = zip(self.rows, self.samples, strict=True)
        return {
            **self.about,
            "summary": [asdict(found) for found in self.summaries],
            "rollouts": [dict(row) for row, sample in pairs if sample.prompt in kept],
        }


def run_eval(request: EvalRequest) -> int:
    """Measure or read, compare where asked, print, and write where asked to."""
    request.demand_sense()
    started = time.monotonic()
    found = _read(request) if request.compare is not None else _measure_all(request)
    seconds = time.monotonic() - started
    comparison = _compare(found, request) if len(found) == 2 else None
    if request.out is not None:
        write_whole(request.out, json_page(report_json(found, comparison, shown=None)))
    if request.as_json:
        page = plain(report_json(found, comparison, shown=request.shown))
        typer.echo(json.dumps(page, indent=2, ensure_ascii=False))
    else:
        for line in report_lines(found, comparison, shown=request.shown, seconds=seconds):
            typer.echo(line)
    return 0


def report_json(
    found: "Sequence[Evaluated]", comparison: "Comparison | None", *, shown: int | None
) -> dict[str, Any]:
    """The whole report; of two policies under `first` and `second`."""
    if comparison is None:
        return found[0].page(shown)
    told = [{**asdict(one), "is_told": one.is_told} for one in comparison.differences]
    return {
        "first": found[0].page(shown),
        "second": found[1].page(shown),
        "comparison": {**asdict(comparison), "differences": told},
    }


def report_lines(
    found: "Sequence[Evaluated]", comparison: "Comparison | None", *, shown: int, seconds: float
) -> Iterator[str]:
    """The whole report for people."""
    from luyen.cli.eval_lines import (
        comparison_lines,
        drawn_differently,
        sample_lines,
        summary_lines,
    )

    for one in found:
        samples = max(row["sample"] for row in one.rows) + 1
        each = f"{samples} sample{'' if samples == 1 else 's'}"
        prompts = len({sample.prompt for sample in one.samples})
        took = "" if comparison is not None else f", {seconds:.1f} s"
        yield one.name
        yield f"{prompts} prompts x {each}{took}"
        yield ""
        yield from summary_lines(one.summaries)
        if comparison is None:
            yield from sample_lines(one.rows, shown)
        else:
            yield ""
    if comparison is not None:
        yield "Comparison"
        yield f"  first   {found[0].name}"
        yield f"  second  {found[1].name}"
        yield from drawn_differently(found[0].rows[0], found[1].rows[0])
        yield from comparison_lines(comparison, shown=shown)


def _compare(found: "Sequence[Evaluated]", request: EvalRequest) -> "Comparison":
    from luyen.studio.evaluation.compare import compare

    return compare(found[0].samples, found[1].samples, solved_at=request.solved_at)


def _read(request: EvalRequest) -> "list[Evaluated]":
    from luyen.studio.evaluation.sample_files import read_rows

    assert request.compare is not None
    return [_evaluated(str(path), read_rows(path), request, {}) for path in request.compare]


def _evaluated(
    name: str, rows: Sequence[Mapping[str, Any]], request: EvalRequest, about: Mapping[str, Any]
) -> Evaluated:
    from luyen.studio.evaluation.samples import samples_of
    from luyen.studio.evaluation.summary import summarise

    samples = samples_of(rows, source=name)
    ks = request.ks(most=max(int(row["sample"]) for row in rows) + 1)
    summaries = summarise(samples, ks, solved_at=request.solved_at)
    about = {"checkpoint": name, **about}
    return Evaluated(name=name, rows=rows, samples=samples, summaries=summaries, about=about)


def _measure_all(request: EvalRequest) -> "list[Evaluated]":
    """The checkpoint, after the one that it is measured against, on the same rows and draws."""
    prepare()
    from luyen.train.checkpointed import open_checkpoint
    from luyen.train.measured_config import AskedMeasure, asked_config, with_model_of

    assert request.checkpoint is not None
    asked = AskedMeasure(
        samples=request.samples,
        temperature=request.temperature,
        top_p=request.top_p,
        data=request.data,
        reward=request.reward,
    )
    trusted = request.is_trusted
    require_trusted_files(request.config, is_trusted=trusted)
    if request.against is not None:  # now, and not after the first has been measured
        require_trusted_path(request.against, is_trusted=trusted)
    opened = open_checkpoint(
        request.checkpoint, request.overrides, files=request.config, is_trusted=trusted
    )
    opened = replace(opened, config=asked_config(opened.config, asked))
    request.ks(most=opened.config.actor_rollout_ref.rollout.val_kwargs.n)
    found = [_measured(opened, request, request.samples_out)]
    if request.against is not None:
        config, opened = opened.config, None  # two models need not fit into memory together
        other = open_checkpoint(
            request.against, request.overrides, files=request.config, is_trusted=trusted
        )
        other = replace(other, config=with_model_of(config, other.config))
        place = request.samples_out
        beside = None if place is None else place.with_name(f"{place.stem}.against{place.suffix}")
        found.insert(0, _measured(other, request, beside))
    return found


def _measured(opened: "Opened", request: EvalRequest, place: Path | None) -> Evaluated:
    from luyen.studio.evaluation.sample_files import write_rows
    from luyen.train.sample_rows import decoding_of, sample_rows

    measured = _with_progress(opened)
    rows = sample_rows(opened, measured)
    if place is not None:
        write_rows(place, rows)
    about = {
        "step": opened.step,
        "prompts": len(measured.prompts),
        "samples": opened.config.actor_rollout_ref.rollout.val_kwargs.n,
        "decoding": decoding_of(opened),
        "metrics": dict(measured.metrics),
    }
    return _evaluated(opened.name, rows, request, about)


def _with_progress(opened: "Opened") -> "Measured":
    """Measure with a bar on the terminal; nothing is shown where standard error is no terminal."""
    from luyen.train.measure import measure

    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("prompts", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return measure(opened, progress=progress)
