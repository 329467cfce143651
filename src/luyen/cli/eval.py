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

from luyen.base.files import json_page, plain, write_whole
from luyen.base.secrets import masked_urls
from luyen.cli.common import Trust, prepare, refuse_run_file
from luyen.studio.evaluation.request import (
    EndpointArguments,
    EvalRequest,
    SamplingOptions,
    is_override,
    is_url,
)

if TYPE_CHECKING:
    from luyen.config.schema.run import RunConfig
    from luyen.data.tokenizer import Tokenizer
    from luyen.pipeline.policy_loading import LoadedPolicy
    from luyen.studio.evaluation.compare import PolicyComparison
    from luyen.studio.evaluation.endpoint_measure import EndpointPolicy
    from luyen.studio.evaluation.evaluator import Measurement
    from luyen.studio.evaluation.samples import Sample
    from luyen.studio.evaluation.summary import SourceSummary


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
        took = "" if comparison is not None else f", {seconds:.1f} s with loading"
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
    """The baseline, if there is one, and the policy, on the same rows and random numbers."""
    from luyen.config.trust import require_trusted_files, require_trusted_path

    prepare()
    from luyen.pipeline.policy_loading import open_checkpoint, with_model_of

    trusted, against = request.is_trusted, request.against
    require_trusted_files(request.config, is_trusted=trusted)
    if against is not None and not is_url(against):  # now, not after the first is measured
        require_trusted_path(against, is_trusted=trusted)
    opened = _opened(request)
    request.ks(most=opened.config.actor_rollout_ref.rollout.val_kwargs.n)
    found = [_measured(opened, request, request.samples_out)]
    if against is None:
        return found
    config, rows_by, opened = opened.config, _rows_by(opened), None  # two need not fit in memory
    if is_url(against):
        other = _endpoint(against, request, config, rows_by)
    else:
        other = open_checkpoint(
            against, request.overrides, files=request.config, is_trusted=trusted
        )
        other = replace(other, config=with_model_of(config, other.config))
    file = request.samples_out
    baseline = None if file is None else file.with_name(f"{file.stem}.against{file.suffix}")
    return [_measured(other, request, baseline), *found]


def _opened(request: EvalRequest) -> "LoadedPolicy | EndpointPolicy":
    """What is measured, with the configuration of the evaluation."""
    from luyen.pipeline.policy_loading import (
        EvalOverrides,
        checkpoint_config,
        eval_config,
        open_checkpoint,
        read_config,
    )
    from luyen.train.builders.setup import import_plugins, load_run_tokenizer

    overrides, files = request.overrides, request.config
    changes = EvalOverrides(**request.sampling._asdict(), data=request.data, reward=request.reward)
    path, url, trusted = request.checkpoint, request.endpoint.url, request.is_trusted
    if url is None:
        assert path is not None, "the request was validated"
        opened = open_checkpoint(path, overrides, files=files, is_trusted=trusted)
        return replace(opened, config=eval_config(opened.config, changes))
    if path is None:
        config = read_config(files, overrides)
    else:
        config, _ = checkpoint_config(path, overrides, files=files, is_trusted=trusted)
    import_plugins(config.trainer.plugins)
    # Without a configuration no model is named that could say how long a prompt is.
    rows_by = load_run_tokenizer(config) if path is not None or files else None
    return _endpoint(url, request, eval_config(config, changes), rows_by)


def _rows_by(opened: "LoadedPolicy | EndpointPolicy") -> "Tokenizer | None":
    from luyen.studio.evaluation.endpoint_measure import EndpointPolicy

    return opened.rows_by if isinstance(opened, EndpointPolicy) else opened.tokenizer


def _endpoint(
    url: str, request: EvalRequest, config: "RunConfig", rows_by: "Tokenizer | None"
) -> "EndpointPolicy":
    from luyen.studio.evaluation.endpoint import ChatEndpoint, EndpointOptions
    from luyen.studio.evaluation.endpoint_measure import EndpointPolicy

    given, server = request.endpoint, config.actor_rollout_ref.rollout.server
    endpoint = ChatEndpoint.connect(
        EndpointOptions(
            url=url,
            model=given.model,
            api_key_env=given.api_key_env,
            concurrent=given.concurrent or 32,
            timeout_s=server.request_timeout_s,
            retries=server.retries,
        )
    )
    name = f"{masked_urls(url)} {endpoint.model}"
    return EndpointPolicy(config=config, endpoint=endpoint, rows_by=rows_by, name=name)


def _measured(
    opened: "LoadedPolicy | EndpointPolicy", request: EvalRequest, place: Path | None
) -> Evaluated:
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


def _with_progress(opened: "LoadedPolicy | EndpointPolicy") -> "Measurement":
    """Evaluate with a progress bar, which is shown only if standard error is a terminal."""
    from luyen.studio.evaluation.endpoint_measure import EndpointPolicy, measure_endpoint
    from luyen.studio.evaluation.evaluator import measure

    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("prompts", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if isinstance(opened, EndpointPolicy):
            return measure_endpoint(opened, progress=progress)
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
_Url = Annotated[
    str | None,
    typer.Option(
        help="Measure the model behind an OpenAI-compatible endpoint, such as "
        "http://127.0.0.1:8000/v1; CHECKPOINT then gives rows and reward alone.",
        metavar="ADDRESS",
    ),
]
_Model = Annotated[
    str | None, typer.Option(help="Name of the endpoint's model, if it has several.")
]
_ApiKeyEnv = Annotated[
    str | None,
    typer.Option(help="Environment variable that holds the endpoint's key.", metavar="NAME"),
]
_Concurrent = Annotated[
    int | None, typer.Option(min=1, help="Requests to the endpoint at once; default: 32.")
]
_Against = Annotated[
    str | None,
    typer.Option(
        help="The baseline, a checkpoint or an endpoint's address: measured too, and compared.",
        metavar="CHECKPOINT",
    ),
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
_MinP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Keep tokens at least this likely, relative to the likeliest."),
]
_Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends an answer; may be repeated.", metavar="TEXT"),
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
    url: _Url = None,
    model: _Model = None,
    api_key_env: _ApiKeyEnv = None,
    concurrent: _Concurrent = None,
    against: _Against = None,
    compare: _Compare = None,
    config: _Config = None,
    data: _Data = None,
    reward: _Reward = None,
    samples: _Samples = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    min_p: _MinP = None,
    stop: _Stop = None,
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
    refuse_run_file(out)
    refuse_run_file(samples_out, field="--samples-out")
    words = tuple(overrides or ())
    if url is not None and checkpoint is not None and is_override(checkpoint):
        checkpoint, words = None, (checkpoint, *words)
    request = EvalRequest(
        checkpoint=checkpoint,
        overrides=words,
        endpoint=EndpointArguments(url, model, api_key_env, concurrent),
        against=against,
        compare=compare,
        config=tuple(config or ()),
        data=tuple(data or ()),
        reward=reward,
        sampling=SamplingOptions(samples, temperature, top_p, min_p, tuple(stop or ())),
        k=k,
        solved_at=solved_at,
        samples_out=samples_out,
        as_json=as_json,
        out=out,
        shown=show,
        is_trusted=trust,
    )
    raise typer.Exit(run_eval(request))
