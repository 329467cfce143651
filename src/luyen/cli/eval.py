"""`luyen eval`: a checkpoint measured on validation rows, or two compared."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.errors import UserError
from luyen.base.files import json_page, plain, write_whole
from luyen.cli.common import Trust, prepare

if TYPE_CHECKING:
    from luyen.pipeline.checkpoints import LoadedPolicy
    from luyen.studio.evaluation.compare import PolicyComparison
    from luyen.studio.evaluation.evaluator import Measurement
    from luyen.studio.evaluation.samples import Sample
    from luyen.studio.evaluation.summary import SourceSummary


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """The options of the command, as they were given.

    Example:
        >>> EvalRequest(checkpoint="runs/a/b", k="1,4").ks(most=8)
        (1, 4)
    """

    checkpoint: str | None = None
    """What is measured."""
    overrides: tuple[str, ...] = ()
    """`key=value` over its configuration."""
    against: str | None = None
    """What it is compared with."""
    compare: tuple[Path, Path] | None = None
    """Two files of samples to compare, without any model."""
    config: tuple[Path, ...] = ()
    """YAML files that replace rows, reward and sampling of the run."""
    data: tuple[str, ...] = ()
    """Rows in place of `data.val_files`."""
    reward: str | None = None
    """The rule that replaces `reward`."""
    samples: int | None = None
    """Samples of each prompt."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Nucleus sampling mass."""
    k: str | None = None
    """The k of pass@k and maj@k, with commas; None: 1, 2, 4 and so on."""
    solved_at: float = 1.0
    """The reward from which on a sample counts as solved."""
    as_json: bool = False
    """Print data."""
    out: Path | None = None
    """File for the report."""
    samples_out: Path | None = None
    """File for every rollout."""
    shown: int = 3
    """Prompts shown, and prompts that flipped."""
    is_trusted: bool = False
    """Whether code named by a run from another machine may run."""

    def ks(self, most: int) -> tuple[int, ...]:
        """The requested k values; a UserError if one is not between 1 and `most` samples."""
        if self.k is None:
            return tuple(2**i for i in range(most.bit_length()))
        try:
            found = tuple(sorted({int(word) for word in self.k.split(",")}))
        except ValueError:
            raise UserError("--k", self.k, "not numbers with commas", "write e.g. 1,4,8") from None
        if found[0] < 1 or found[-1] > most:
            why = f"each prompt has {most} sample{'' if most == 1 else 's'}"
            raise UserError("--k", self.k, why, f"stay within 1 and {most}, or raise --samples")
        return found

    def validate(self) -> None:
        """A UserError for inconsistent options, before anything is loaded."""
        if (self.checkpoint is None) == (self.compare is None):
            why = "either a checkpoint is measured, or two files of samples are compared"
            fix = "give CHECKPOINT, or --compare A.jsonl B.jsonl"
            raise UserError("CHECKPOINT", self.checkpoint, why, fix)
        if self.compare is not None and (self.against or self.samples_out):
            fix = "leave --against and --samples-out out, or give a checkpoint"
            raise UserError("--compare", None, "files are compared without any model", fix)
        for field, path in (("--out", self.out), ("--samples-out", self.samples_out)):
            if path is not None and not path.parent.is_dir():
                raise UserError(field, str(path), "its folder is not there", "make it first")
        endings = (".jsonl", ".parquet")
        if self.samples_out is not None and self.samples_out.suffix not in endings:
            why = "its ending names no format of samples"
            raise UserError("--samples-out", str(self.samples_out), why, "use .jsonl or .parquet")


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
    """The same as records for statistics."""
    summaries: "Sequence[SourceSummary]"
    """Summary of each data source."""
    about: Mapping[str, Any]
    """Further entries of the report."""

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
    """Evaluate or read samples, compare two policies if requested, print and write the report."""
    request.validate()
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
    found: "Sequence[Evaluated]", comparison: "PolicyComparison | None", *, shown: int | None
) -> dict[str, Any]:
    """The whole report; of two policies under `first` and `second`."""
    if comparison is None:
        return found[0].page(shown)
    differences = [{**asdict(one), "is_told": one.is_significant} for one in comparison.differences]
    return {
        "first": found[0].page(shown),
        "second": found[1].page(shown),
        "comparison": {**asdict(comparison), "differences": differences},
    }


def report_lines(
    found: "Sequence[Evaluated]",
    comparison: "PolicyComparison | None",
    *,
    shown: int,
    seconds: float,
) -> Iterator[str]:
    """The whole report as text."""
    from luyen.studio.evaluation.text import (
        comparison_lines,
        sample_lines,
        sampling_differences,
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
        yield from sampling_differences(found[0].rows[0], found[1].rows[0])
        yield from comparison_lines(comparison, shown=shown)


def _compare(found: "Sequence[Evaluated]", request: EvalRequest) -> "PolicyComparison":
    from luyen.studio.evaluation.compare import compare

    return compare(found[0].samples, found[1].samples, solved_at=request.solved_at)


def _read(request: EvalRequest) -> "list[Evaluated]":
    from luyen.studio.evaluation.samples import read_rows

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
    """The baseline, if there is one, and the checkpoint, on the same rows and random numbers."""
    from luyen.config.trust import require_trusted_files, require_trusted_path

    prepare()
    from luyen.pipeline.checkpoints import (
        EvalOverrides,
        eval_config,
        open_checkpoint,
        with_model_of,
    )

    assert request.checkpoint is not None
    eval_overrides = EvalOverrides(
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
    opened = replace(opened, config=eval_config(opened.config, eval_overrides))
    request.ks(most=opened.config.actor_rollout_ref.rollout.val_kwargs.n)
    found = [_measured(opened, request, request.samples_out)]
    if request.against is not None:
        config, opened = opened.config, None  # two models need not fit into memory together
        other = open_checkpoint(
            request.against, request.overrides, files=request.config, is_trusted=trusted
        )
        other = replace(other, config=with_model_of(config, other.config))
        file = request.samples_out
        baseline = None if file is None else file.with_name(f"{file.stem}.against{file.suffix}")
        found.insert(0, _measured(other, request, baseline))
    return found


def _measured(opened: "LoadedPolicy", request: EvalRequest, place: Path | None) -> Evaluated:
    from luyen.studio.evaluation.evaluator import decoding_of, sample_rows
    from luyen.studio.evaluation.samples import write_rows

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


def _with_progress(opened: "LoadedPolicy") -> "Measurement":
    """Evaluate with a progress bar, which is shown only if standard error is a terminal."""
    from luyen.studio.evaluation.evaluator import measure

    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("prompts", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return measure(opened, progress=progress)


# The options of `luyen eval`.

_Checkpoint = Annotated[
    str | None,
    typer.Argument(
        help="A checkpoint, a run directory (its newest one), or a Hugging Face directory.",
        metavar="CHECKPOINT",
    ),
]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides of the run's configuration.", metavar="[KEY=VALUE]..."),
]
_Against = Annotated[
    str | None, typer.Option(help="The baseline: measured too, and compared.", metavar="CHECKPOINT")
]
_Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(help="Compare two files of --samples-out; no model is loaded."),
]
_Config = Annotated[
    list[Path] | None,
    typer.Option(help="YAML with rows, reward and sampling, in place of the run's own."),
]
_Data = Annotated[
    list[str] | None, typer.Option(help="Rows in place of data.val_files; may be repeated.")
]
_Reward = Annotated[
    str | None, typer.Option(help="The rule that judges, in place of the reward.", metavar="RULE")
]
_Samples = Annotated[
    int | None, typer.Option(min=1, help="Samples of each prompt; several imply sampling.")
]
_Temperature = Annotated[
    float | None, typer.Option(min=0, help="Sampling temperature; 0 takes the likeliest token.")
]
_TopP = Annotated[
    float | None, typer.Option(min=1e-6, max=1, help="Keep the likeliest tokens of this mass.")
]
_K = Annotated[
    str | None, typer.Option(help="Which pass@k and maj@k, e.g. 1,4,8; default: powers of two.")
]
_SolvedAt = Annotated[float, typer.Option(help="Reward from which on a sample counts as solved.")]
_SamplesOut = Annotated[
    Path | None, typer.Option(help="Write every rollout to FILE.jsonl or FILE.parquet.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_Out = Annotated[
    Path | None, typer.Option(help="Also write the report, with every rollout, as JSON.")
]
_Show = Annotated[int, typer.Option(min=0, help="Prompts whose answers are shown.")]


def evaluate(
    checkpoint: _Checkpoint = None,
    overrides: _Overrides = None,
    against: _Against = None,
    compare: _Compare = None,
    config: _Config = None,
    data: _Data = None,
    reward: _Reward = None,
    samples: _Samples = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    k: _K = None,
    solved_at: _SolvedAt = 1.0,
    samples_out: _SamplesOut = None,
    as_json: _AsJson = False,
    out: _Out = None,
    show: _Show = 3,
    trust: Trust = False,
) -> None:
    """Measure a checkpoint on its run's validation rows, or compare two.

    Samples exactly as the run's own validation does, unless options change that. Nothing is
    written without --out or --samples-out.
    """
    request = EvalRequest(
        checkpoint=checkpoint,
        overrides=tuple(overrides or ()),
        against=against,
        compare=compare,
        config=tuple(config or ()),
        data=tuple(data or ()),
        reward=reward,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        k=k,
        solved_at=solved_at,
        samples_out=samples_out,
        as_json=as_json,
        out=out,
        shown=show,
        is_trusted=trust,
    )
    raise typer.Exit(run_eval(request))
