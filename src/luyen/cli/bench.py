"""`luyen bench`: throughput of this machine, compared with its roofline."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import typer

from luyen.base.errors import UserError
from luyen.cli.common import prepare

Kind: TypeAlias = Literal["rollout", "train", "step"]
_GIB = 1 << 30


def run_bench(
    kind: Kind, *, model: str, device: str, dtype: str, as_json: bool, work: Mapping[str, Any]
) -> int:
    """Measure and print; 0."""
    prepare()
    import torch

    from luyen.config.schema.model import ModelConfig
    from luyen.models.load import choose_threads
    from luyen.models.random_policy import shaped_policy
    from luyen.studio.bench import measure_ceilings

    device = _device(device, has_cuda=torch.cuda.is_available())
    number = getattr(torch, dtype if dtype != "auto" else _dtype(device))
    saving = ModelConfig(
        lora_rank=work["lora_rank"], enable_gradient_checkpointing=work["gradient_checkpointing"]
    )
    policy = shaped_policy(model, dtype=number, device=device, model=saving)
    choose_threads(policy)
    ceilings = measure_ceilings(device, number)
    page = {
        "kind": kind,
        "model": model,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": str(number).removeprefix("torch."),
        "torch": torch.__version__,
        **work,
        "terabytes_per_second": ceilings.bytes_per_second / 1e12,
        "teraflops": ceilings.flops_per_second / 1e12,
        **_figures(kind, policy, ceilings, work),
    }
    typer.echo(json.dumps(page, indent=2) if as_json else _table(page))
    return 0


def _figures(kind: Kind, policy: Any, ceilings: Any, work: Mapping[str, Any]) -> dict[str, Any]:
    from luyen.config.schema.actor_rollout_ref import RolloutConfig
    from luyen.studio.bench import Workload, measure_rollout, measure_step

    workload = Workload(
        prompts=work["prompts"], samples=work["samples"], prompt=work["prompt"], new=work["new"]
    )
    rollout = RolloutConfig(
        max_num_seqs=work["max_num_seqs"],
        max_num_batched_tokens=work["max_num_batched_tokens"],
        gpu_memory_utilization=0.8,
        deterministic=work["deterministic"],
        enforce_eager=work["eager"],
    )
    if kind == "rollout":
        return dataclasses.asdict(measure_rollout(policy, workload, ceilings, rollout=rollout))
    most = work["max_tokens"]
    training = {"max_tokens": most, "offload": work["offload"]}
    step = measure_step(policy, workload, ceilings, rollout=rollout, **training)
    figures = dataclasses.asdict(step)
    if kind == "train":
        del figures["generate_seconds"]
    return figures


def _device(name: str, *, has_cuda: bool) -> str:
    if name == "cuda" and not has_cuda:
        raise UserError("--device", name, "this machine has no CUDA device", "use --device cpu")
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    return name


def _dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def _table(page: Mapping[str, Any]) -> str:
    """One line a figure."""
    lines: list[str] = []
    for name, value in page.items():
        shown = value
        if name.endswith("_bytes"):
            shown = f"{value / _GIB:.2f} GiB"
        elif isinstance(value, float):
            shown = f"{value:.4g}"
        elif isinstance(value, dict):
            shown = ", ".join(f"{key} {item}" for key, item in value.items())
        lines.append(f"{name.replace('_', ' '):28s} {shown}")
    return "\n".join(lines)


# The options of `luyen bench`.

KindOption: TypeAlias = Annotated[
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
Offload: TypeAlias = Annotated[
    bool, typer.Option(help="Of an update on a GPU: the optimizer in host memory.")
]
Eager: TypeAlias = Annotated[bool, typer.Option(help="Without captured graphs.")]
Rank: TypeAlias = Annotated[
    int, typer.Option("--lora-rank", help="An adapter of this rank learns; 0: all weights.", min=0)
]
Again: TypeAlias = Annotated[
    bool, typer.Option(help="Compute activations again in the backward pass.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def bench(
    kind: KindOption,
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
    offload: Offload = False,
    lora_rank: Rank = 0,
    gradient_checkpointing: Again = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine with random weights, and compare the figures with its roofline.

    The floor of generation is the bytes it must move, that of an update the operations it must do,
    over what a large copy and a large matrix product reach here.
    """
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
        "offload": offload,
        "lora_rank": lora_rank,
        "gradient_checkpointing": gradient_checkpointing,
    }
    raise typer.Exit(
        run_bench(kind, model=model, device=device, dtype=dtype, as_json=as_json, work=work)
    )
