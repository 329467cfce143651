"""Train on a small file system until it is full, again and again with less and less left.

Started as `unshare --mount --map-root-user python -m tests.e2e.full_disk_job FOLDER` with a folder
to mount over. Prints for each case what the run said.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.train import session
from luyen.train.start import run_training
from tests.runs import report_of

SIZE = "24m"
STEPS = 4
LEFT_KB = (0, 12, 64, 128, 256, 512)
"""Room that is left after step 1."""


def overrides(name: str, *, is_async: bool) -> tuple[str, ...]:
    return (
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.logger=[jsonl, tensorboard]",
        f"trainer.async_save={str(is_async).lower()}",
    )


def train_without_curves(folder: Path, *words: str) -> None:
    """A run on a disk with room; curves, which take longer than it, are for the one without."""
    with mock.patch.object(session, "plot_curves", return_value=[]):
        run_training(report_of(folder, *words))


def fill(folder: Path, left_kb: int) -> Path:
    """Leave so much room, and no more."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            stats = os.statvfs(folder)
            room = stats.f_bavail * stats.f_frsize - left_kb * 1024
            if room <= 0:
                return filler
            os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), room)


def interrupted(folder: Path, name: str, left_kb: int, *, is_async: bool) -> str | None:
    """Train, with the disk full after step 1; what was said, or None when it was enough."""
    words = overrides(name, is_async=is_async)
    train_without_curves(folder, *words, "trainer.total_training_steps=1")
    filler = fill(folder, left_kb)
    try:
        run_training(report_of(folder, *words))
    except UserError as error:
        return str(error)
    finally:
        filler.unlink()
    return None


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)
    train_without_curves(folder, *overrides("whole", is_async=False))
    whole = read_digests(folder / "luyen" / "whole" / "digests.jsonl")[-1].chain
    for index, left in enumerate(LEFT_KB):
        is_async = index % 2 == 1
        name = f"left_{left}"
        said = interrupted(folder, name, left, is_async=is_async)
        train_without_curves(folder, *overrides(name, is_async=is_async))
        chain = read_digests(folder / "luyen" / name / "digests.jsonl")[-1].chain
        assert chain == whole, f"{left} KiB: the resumed run went another way"
        print(f"{left}\t{said}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
