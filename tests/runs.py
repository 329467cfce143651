"""Short runs: a tiny model, a few steps, and what they left in the run directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
import torch
from torch import Tensor

from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report, check
from luyen.runtime.in_process import STRICT_VARIABLE as STRICT
from luyen.runtime.in_process import LocalWorkers, SharedRollout
from luyen.runtime.worker import TrainWorker
from luyen.telemetry.metrics import read_metrics
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from luyen.train.start import prepare_online

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
SHAPE = "{num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2,"
TINY = (
    "data.train_files=arithmetic://sum?digits=1&size=32",
    "data.max_prompt_length=32",
    "data.max_response_length=6",
    "data.train_batch_size=4",
    f"{MODEL}.init=random",
    f"{MODEL}.enable_gradient_checkpointing=false",
    # Large weights: probabilities far from uniform, so that a difference shows.
    f"{MODEL}.override_config={SHAPE} num_key_value_heads: 1, head_dim: 16,"
    " initializer_range: 0.2}",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.ppo_max_token_len_per_gpu=512",
    f"{ACTOR}.optim.lr=1.0e-3",
    f"{ROLLOUT}.n=4",
    "algorithm.adv_estimator=grpo",
    f"reward.custom_reward_function.path={Path(__file__).parent / 'shares_reward.py'}",
    "trainer.total_training_steps=2",
    "trainer.logger=jsonl",
)
"""A run of a random model that takes less than a second and whose groups differ in reward."""

TURNS = f"{ROLLOUT}.multi_turn"
CHATTY = (
    f"trainer.plugins=[{Path(__file__).parent / 'chatty_plugin.py'}]",
    f"{TURNS}.enable=true",
    f"{TURNS}.format=chatty",
    f"{TURNS}.function_tool_path={Path(__file__).parent / 'chatty_tools.py'}",
    f"{TURNS}.max_assistant_turns=4",
    "data.max_prompt_length=320",
    "data.max_response_length=160",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
)
"""What makes such a run one of conversations in which tools are called."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """What a finished run left."""

    root: Path
    metrics: list[dict[str, float]]
    """Metrics of each step that depend on nothing but the run, in order."""
    weights: dict[str, Tensor]
    """What the policy learned, by name."""

    def course(self, name: str) -> list[float]:
        """A metric at every step that has it."""
        return [values[name] for values in self.metrics if name in values]


def report_of(folder: Path, *overrides: str, files: Sequence[Path] = ()) -> Report:
    """The check of a run below `folder`; a tiny one unless files say otherwise."""
    words = [*([] if files else TINY), f"trainer.default_local_dir={folder}", *overrides]
    return check(files, words)


def train(folder: Path, *overrides: str, files: Sequence[Path] = ()) -> Ran:
    """Run to the end and read back what is there. No curves are drawn: they take the most time.

    In one process, too, what the loop and the roles exchange is pickled as on a cluster.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(STRICT, "1")
        run = prepare(folder, *overrides, files=files)
    try:
        run.display.start(run.total_steps, done=run.step)  # shows something with a console alone
        train_online(run)
    finally:
        run.display.close()
        close(run)
    return read_back(run.recorder.directory.root)


def read_back(root: Path) -> Ran:
    """What a run left in its directory."""
    newest = CheckpointStore(root / "checkpoints").newest_sound()
    assert newest is not None
    lines = read_metrics(root / "metrics.jsonl")
    return Ran(
        root=root,
        metrics=[{"step": float(line.step), **line.timeless()} for line in lines],
        weights=load_state(newest.path, "actor"),
    )


def prepare(folder: Path, *overrides: str, files: Sequence[Path] = ()) -> OnlineRun:
    """A run that is ready to begin; close it with `close`."""
    report = report_of(folder, *overrides, files=files)
    assert report.is_sound, report.problems
    return prepare_online(report)


def close(run: OnlineRun) -> None:
    """Free what `prepare` opened."""
    run.recorder.close()
    run.reward.close()
    run.roles.close()


def worker_of(run: OnlineRun) -> TrainWorker:
    """The worker of a run in this process."""
    assert isinstance(run.roles.workers, LocalWorkers)
    return run.roles.workers.worker


def rollout_of(run: OnlineRun) -> SharedRollout:
    """The rollout role of a synchronous run in this process."""
    assert isinstance(run.roles.rollout, SharedRollout)
    return run.roles.rollout


def same_weights(one: Ran, other: Ran) -> bool:
    """Whether two runs ended with bit-equal weights."""
    assert one.weights.keys() == other.weights.keys()
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
