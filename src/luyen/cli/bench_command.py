"""The options of `luyen bench`."""

from typing import Annotated, Literal, TypeAlias

import typer

Kind: TypeAlias = Annotated[
    Literal["rollout", "train", "step"],
    typer.Argument(help="Answers alone, an update alone, or both.", metavar="KIND"),
]
Model: TypeAlias = Annotated[
    str, typer.Option(help="A shape (smollm2-135m, qwen2.5-0.5b, ...) or a model directory.")
]
Device: TypeAlias = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where.")]
Dtype: TypeAlias = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Of weights; auto: bfloat16 on a GPU, float32 elsewhere."),
]
Prompts: TypeAlias = Annotated[int, typer.Option(help="Prompts.", min=1)]
Samples: TypeAlias = Annotated[int, typer.Option(help="Answers to each prompt.", min=1)]
Prompt: TypeAlias = Annotated[
    tuple[int, int], typer.Option(help="Least and most tokens of a prompt.")
]
New: TypeAlias = Annotated[tuple[int, int], typer.Option(help="Least and most of an answer.")]
Rows: TypeAlias = Annotated[int, typer.Option(help="Most sequences at once.", min=1)]
Read: TypeAlias = Annotated[int, typer.Option(help="Most prompt tokens of one pass.", min=1)]
Most: TypeAlias = Annotated[
    int, typer.Option(help="Most tokens of one micro-batch of the update.", min=1)
]
Exact: TypeAlias = Annotated[bool, typer.Option(help="Log-probabilities agree to the bit.")]
Eager: TypeAlias = Annotated[bool, typer.Option(help="Without captured graphs.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def bench(
    kind: Kind,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    dtype: Dtype = "auto",
    prompts: Prompts = 32,
    samples: Samples = 8,
    prompt: Prompt = (256, 256),
    new: New = (256, 256),
    max_num_seqs: Rows = 1024,
    max_num_batched_tokens: Read = 32768,
    max_tokens: Most = 65536,
    deterministic: Exact = True,
    eager: Eager = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine with random weights, and show the floor beside the figures.

    The floor of answers is the bytes they must move, that of an update the operations it must do,
    over what a large copy and a large product reach here.
    """
    from luyen.cli.bench import run_bench

    work = {
        "prompts": prompts,
        "samples": samples,
        "prompt": prompt,
        "new": new,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_tokens": max_tokens,
        "deterministic": deterministic,
        "eager": eager,
    }
    raise typer.Exit(
        run_bench(kind, model=model, device=device, dtype=dtype, as_json=as_json, work=work)
    )
