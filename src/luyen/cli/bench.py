"""`luyen bench`: figures of this machine, with the floor beside them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import typer

from luyen.base.errors import UserError
from luyen.cli.quiet import prepare
from luyen.config.schema.rollout import Rollout

Kind: TypeAlias = Literal["rollout", "train", "step"]
_GIB = 1 << 30


def run_bench(
    kind: Kind, *, model: str, device: str, dtype: str, as_json: bool, work: Mapping[str, Any]
) -> int:
    """Measure and print; 0."""
    prepare()
    import torch

    from luyen.models.shapes import shaped_policy
    from luyen.models.threads import choose_threads
    from luyen.train.bench.roofline import measure_ceilings

    device = _device(device, is_there=torch.cuda.is_available())
    number = getattr(torch, dtype if dtype != "auto" else _dtype(device))
    policy = shaped_policy(model, dtype=number, device=device)
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
    from luyen.train.bench.rollout import measure_rollout
    from luyen.train.bench.update import measure_step
    from luyen.train.bench.work import Work

    asked = Work(
        prompts=work["prompts"], samples=work["samples"], prompt=work["prompt"], new=work["new"]
    )
    rollout = Rollout(
        max_num_seqs=work["max_num_seqs"],
        max_num_batched_tokens=work["max_num_batched_tokens"],
        gpu_memory_utilization=0.8,
        deterministic=work["deterministic"],
        enforce_eager=work["eager"],
    )
    if kind == "rollout":
        return dataclasses.asdict(measure_rollout(policy, asked, ceilings, rollout=rollout))
    most = work["max_tokens"]
    step = measure_step(policy, asked, ceilings, rollout=rollout, max_tokens=most)
    figures = dataclasses.asdict(step)
    if kind == "train":
        del figures["generate_seconds"]
    return figures


def _device(asked: str, *, is_there: bool) -> str:
    if asked == "cuda" and not is_there:
        raise UserError("--device", asked, "this machine has no CUDA device", "use --device cpu")
    if asked == "auto":
        return "cuda" if is_there else "cpu"
    return asked


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
