"""The options of `luyen eval`."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.cli.eval_request import EvalRequest
from luyen.cli.trust_option import Trust

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
    typer.Option(help="YAML with rows, reward and draws, in place of the run's own."),
]
_Data = Annotated[
    list[str] | None, typer.Option(help="Rows in place of data.val_files; may be repeated.")
]
_Reward = Annotated[
    str | None, typer.Option(help="The rule that judges, in place of the reward.", metavar="RULE")
]
_Samples = Annotated[
    int | None, typer.Option(min=1, help="Samples of each prompt; several are drawn.")
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

    Draws exactly as the run's own validation does, unless told otherwise. Nothing is written
    without --out or --samples-out.
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
    raise typer.Exit(_run(request))


def _run(request: EvalRequest) -> int:
    from luyen.cli.eval import run_eval

    return run_eval(request)
