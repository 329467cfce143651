"""How long a save holds training up: written at once, or copied and written beside training.

Weights in bf16 with fp32 masters and two moments each, in the shapes of a model with 135M
parameters. Nothing is trained; what is timed is what a step waits for.

    python benchmarks/checkpoint_save.py --rounds 3
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.writer import CheckpointWriter
from luyen.train.record import require_finite

LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 30, 576, 1536, 192, 49152
LAYER = (
    ((HIDDEN, HIDDEN),) * 2 + ((KEYS, HIDDEN),) * 2 + ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),)
)


def state_of(device: str) -> dict[str, Any]:
    """What the roles of a run give to a checkpoint."""
    shapes = [(VOCABULARY, HIDDEN), *(LAYER * LAYERS), *([(HIDDEN,)] * (2 * LAYERS + 1))]
    masters = [torch.randn(shape, device=device) for shape in shapes]
    moments: dict[int, dict[str, Tensor]] = {
        index: {"step": torch.tensor(1.0), "exp_avg": m * 0.1, "exp_avg_sq": m * m}
        for index, m in enumerate(masters)
    }
    weights = {f"parameter {index}": m.bfloat16() for index, m in enumerate(masters)}
    optimizer = {"adamw": {"state": moments, "param_groups": []}, "masters": masters}
    return {"actor": weights, "actor_optimizer": optimizer}


def timed_saves(state: dict[str, Any], folder: Path, rounds: int, *, is_async: bool) -> list[Any]:
    """(seconds that training waits, seconds until the checkpoint is there) of each save."""
    writer = CheckpointWriter(CheckpointStore(folder, keep=1), is_async=is_async)
    found: list[tuple[float, float]] = []
    for step in range(rounds + 1):
        start = time.perf_counter()
        require_finite(state, step=step, newest=None)
        writer.save(step, state, facts={})
        waited = time.perf_counter() - start
        writer.wait()
        found.append((waited, time.perf_counter() - start))
    shutil.rmtree(folder)
    return found


def main() -> None:
    """Time both ways and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; a temporary one")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = state_of(device)
    count = sum(weight.numel() for weight in state["actor"].values())
    print(f"{count / 1e6:.1f}M parameters, {14 * count / 1e9:.2f} GB a checkpoint, {device}")
    root = arguments.folder or Path(tempfile.mkdtemp())
    for name, is_async in (("at once", False), ("beside training", True)):
        found = timed_saves(state, root / name, arguments.rounds, is_async=is_async)
        waited, there = (median(column) for column in zip(*found[1:], strict=True))
        print(
            f"{name}: waits {waited:.2f} s (first {found[0][0]:.2f} s), there after {there:.2f} s"
        )


if __name__ == "__main__":
    main()
