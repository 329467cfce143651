"""A model of the built-in shape with random weights, and runs of it that take a second."""

import shutil
from pathlib import Path

from typer.testing import CliRunner, Result

from luyen.cli.main import app
from luyen.data.tokenizer import resolve_path
from luyen.models.random_policy import random_policy

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def random_model(directory: Path) -> Path:
    """The built-in model's shape and tokenizer with random weights."""
    directory.mkdir(parents=True)
    random_policy().model.save_pretrained(directory)
    for name in TOKENIZER:
        shutil.copyfile(Path(resolve_path("builtin://arithmetic")) / name, directory / name)
    return directory


def luyen(*words: str | Path, stdin: str | None = None) -> Result:
    """A command as a user calls it, in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


def train(model: Path, runs: Path, *overrides: str) -> Path:
    """The run directory of one step of the quickstart with this model."""
    # Any number counts as a little: random weights would otherwise never differ in reward.
    done = luyen(
        "train",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={runs}",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "trainer.test_freq=-1",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_files=arithmetic://sum?digits=2&split=held-out&size=24",
        "reward.components.digit={rule: regex, kwargs: {pattern: '[0-9]', match: search}}",
        *overrides,
    )
    assert done.exit_code == 0, done.output
    return runs / "luyen" / "quickstart"
