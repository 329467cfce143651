"""`trainer`: where the run lives, how long it lasts, what it saves and says."""

from typing import Literal

from luyen.config.schema.block import (
    KEPT_WORDS,
    MOST_DEVICES,
    MOST_MACHINES,
    SAVE_WORDS,
    Block,
    Names,
    Steps,
    block,
    key,
)


class ProfileConfig(Block):
    """Steps that are looked at closely: what ran when, and for how long."""

    steps: Steps = key(
        (),
        "Steps that are profiled. Each leaves a trace that Perfetto opens and a table of its "
        "heaviest operators; `luyen profile` does the same in a run of its own.",
    )
    memory: bool = key(
        False,
        "On a GPU: also a snapshot of every allocation of these steps, for pytorch.org/memory_viz.",
    )
    save_path: str | None = key(
        None, "Folder of these files; null: `profile` in the run directory."
    )


class WatchdogConfig(Block):
    """How long a run may stand still, and what becomes of it then."""

    budget_s: float = key(
        1800.0, "Seconds without any sign of life before a phase is said to hang; 0: never.", ge=0
    )
    on_hang: Literal["report", "stop"] = key(
        "report",
        "report: write down what every thread is doing, and wait on; stop: do so, save what can be "
        "saved, and end the process with exit code 75.",
    )
    budgets: dict[str, float] = key(
        {},
        "Seconds of single phases: generate, score, log-probs, update, digest, validate, between.",
    )


class TrainerConfig(Block):
    """The life of a run."""

    stage: Literal["rl", "sft", "preference", "reward_model", "distill"] = key(
        "rl",
        "rl: learn from rewards; sft: from the conversations that are given; preference: from "
        "pairs or marked answers; reward_model: to judge as preferences do; distill: from a "
        "teacher.",
    )
    nnodes: int = key(1, "Machines.", ge=1, le=MOST_MACHINES)
    n_gpus_per_node: int = key(
        1, "Devices of each machine (on CPU: worker processes).", ge=1, le=MOST_DEVICES
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: CUDA where there is one.")
    runtime: Literal["auto", "local", "ray"] = key(
        "auto", "auto: local for one device, Ray for more."
    )
    max_staleness: int = key(
        0, "Steps by which generation may run ahead of training; 0 is synchronous.", ge=0
    )
    async_order: Literal["submission", "completion"] = key(
        "submission",
        "How steps take rollouts with `max_staleness` above 0. submission: each step those asked "
        "for it, drawn by one version of the weights, so that batches repeat; completion: what "
        "finishes first of those asked for, with new weights in the middle of answers, for speed.",
    )
    total_epochs: int = key(1, "Passes over the training rows.", ge=1)
    total_training_steps: int | None = key(
        None, "Steps of the run; null: as many as `total_epochs` makes.", ge=1
    )
    save_freq: int = key(
        -1, "Steps between checkpoints; -1: only at the end.", derived=SAVE_WORDS, ge=-1
    )
    test_freq: int = key(-1, "Steps between validations; -1: only at the end.", ge=-1)
    val_before_train: bool = key(True, "Validate before the first step.")
    max_ckpt_to_keep: int | None = key(
        None, "Newest checkpoints that stay after a save; null: all.", derived=KEPT_WORDS, ge=1
    )
    keep_best: int = key(
        0, "Best checkpoints that stay besides the newest `max_ckpt_to_keep`.", ge=0
    )
    best_metric: str = key(
        "val/accuracy",
        "Metric that `keep_best` compares: its last value when a checkpoint was made.",
        min_length=1,
    )
    best_mode: Literal["max", "min"] = key("max", "Which values of `best_metric` are better.")
    async_save: bool | None = key(
        None,
        "Write checkpoints while training goes on, from a copy of weights and optimizer in main "
        "memory; null: where there is a GPU.",
    )
    seed: int = key(0, "The one seed that every random choice derives from.", ge=0)
    critic_warmup: int = key(0, "First steps in which only the critic learns.", ge=0)
    resume_mode: Literal["auto", "disable", "path"] = key(
        "auto",
        "auto: from the newest checkpoint of this experiment, if there is one; disable: an earlier "
        "run of this name is an error; path: from `resume_from_path`.",
    )
    resume_from_path: str | None = key(None, "Checkpoint of `resume_mode: path`.")
    default_local_dir: str = key("runs", "Folder under which run directories are made.")
    project_name: str = key("luyen", "First part of the run directory's name.", min_length=1)
    experiment_name: str = key(
        "run",
        "Second part of the run directory's name. A run that is given a name goes on where the run "
        "of that name was; left out, a new run is named after its configuration file and the time.",
        min_length=1,
    )
    logger: Names = key(
        ("console", "tensorboard"),
        "Where metrics go besides metrics.jsonl, which every run writes: console, tensorboard, "
        "wandb, mlflow, trackio. `jsonl` is accepted and adds nothing.",
    )
    plugins: Names = key((), "Python files that register estimators, losses, rewards or engines.")
    profile: ProfileConfig = block(ProfileConfig, "Steps that are looked at closely.")
    watchdog: WatchdogConfig = block(WatchdogConfig, "How long a run may stand still.")
