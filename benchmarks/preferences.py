"""`python benchmarks/preferences.py [LOSS...]`: does every preference objective learn a taste?

The built-in model answers sums. Of two wrong answers the even one is better: something that the
model does not care about, so that half of the held-out pairs are right before training. Each
objective gets the same rows, steps and learning rate, and one thread.
"""

import sys
import tempfile
import time

import torch

from luyen.config.catalog import PREFERENCE_LOSSES
from luyen.config.check import check
from luyen.train.offline.loop import train_offline
from luyen.train.offline.start import prepare_offline

STEPS = 80
_PAIRS, _MARKED = "pairs=even", "labels=even"
_COMMON = (
    "trainer.stage=preference",
    f"trainer.total_training_steps={STEPS}",
    "trainer.logger=[jsonl]",
    "trainer.project_name=preferences",
    "data.train_batch_size=32",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    "actor_rollout_ref.actor.optim.lr=0.001",
)
OWN = {"kto": ("data.train_batch_size=64",), "bco": ("data.train_batch_size=64",)}
"""What an objective needs beside the common settings."""


def learn(loss: str, folder: str) -> tuple[float, float, float]:
    """Held-out accuracy before and after, and the seconds in between."""
    kind = _PAIRS if PREFERENCE_LOSSES[loss].kind == "pair" else _MARKED
    words = [
        *_COMMON,
        *OWN.get(loss, ()),
        f"preference.loss_type={loss}",
        f"data.train_files=[arithmetic://sum?{kind}&size=4000]",
        f"data.val_files=[arithmetic://sum?{kind}&split=held-out&size=200]",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={loss}",
    ]
    report = check([], words)
    assert report.is_sound, report.problems
    run = prepare_offline(report)
    start = time.monotonic()
    train_offline(run)
    seconds = time.monotonic() - start
    run.files.close()
    name = "preference/val_accuracy"
    return run.first[name], run.last[name], seconds


def main(names: list[str]) -> int:
    """Print a table; how many objectives missed their bar."""
    torch.set_num_threads(1)
    missed = 0
    print("| loss | before | after | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for loss in names or PREFERENCE_LOSSES:
            before, after, seconds = learn(loss, folder)
            bar = 0.9 if PREFERENCE_LOSSES[loss].kind == "pair" else 0.8
            missed += after < bar
            print(f"| `{loss}` | {before:.3f} | {after:.3f} | {seconds:.0f} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
