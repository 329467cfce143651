"""Train on file systems that take only so many files, one after the other.

Started as `unshare --mount --map-root-user python -m tests.e2e.few_inodes_job FOLDER` with a folder
to mount over. Prints for each number of files what the run said.
"""

import subprocess
import sys
import warnings
from pathlib import Path

import torch

from luyen.base.errors import UserError
from luyen.train import session
from luyen.train.start import run_training
from tests.runs import report_of

FILES = (*range(3, 36, 2), 60)
"""How many files there may be; the last number is enough."""


def said_with(folder: Path, files: int) -> str | None:
    """What a run says that may make so many files; None when it came to its end."""
    place = folder / "small"
    place.mkdir(exist_ok=True)
    options = f"size=24m,nr_inodes={files}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    words = ("trainer.save_freq=1", "trainer.total_training_steps=2")
    try:
        run_training(report_of(place, *words, "trainer.logger=[jsonl, tensorboard]"))
    except UserError as error:
        return str(error)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    return None


def main() -> None:
    """Every case in turn."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    session.plot_curves = lambda *_: []  # pictures take longer than the run
    folder = Path(sys.argv[1])
    for files in FILES:
        sys.stdout.write(f"{files}\t{said_with(folder, files)}\n")


if __name__ == "__main__":
    main()
