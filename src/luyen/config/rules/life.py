"""S: the life of a run: devices, steps, validation, saving, resuming, logging."""

from collections.abc import Iterator
from pathlib import Path

from luyen.base import compat
from luyen.base.paths import is_directory
from luyen.base.suggest import did_you_mean
from luyen.config.plan import needs_critic
from luyen.config.plugins import LOGGERS
from luyen.config.rules.rule import Finding, Situation, rule


@rule("S01", "error")
def device_exists(s: Situation) -> Iterator[Finding]:
    """A local run on CUDA has a GPU; on Ray the devices of the cluster are counted at its start."""
    gpus = len(s.machine.gpu_bytes)
    if s.config.trainer.device == "cuda" and s.where.runtime == "local" and gpus == 0:
        yield Finding(
            field="trainer.device",
            why=f"a GPU is asked for and this machine has {gpus}",
            fix="set trainer.device=cpu or auto, or run the check where the GPUs are",
        )


@rule("S02", "error")
def runtime_spans_the_devices(s: Situation) -> Iterator[Finding]:
    """More than one device needs the Ray runtime and a sharded training engine."""
    trainer, actor = s.config.trainer, s.config.actor_rollout_ref.actor
    if s.where.world_size > 1 and trainer.runtime == "local":
        yield Finding(
            field="trainer.runtime",
            why=f"local is one process; nnodes x n_gpus_per_node = {s.where.world_size}",
            fix="drop it (Ray is then used), or set nnodes=1 and n_gpus_per_node=1",
        )
    if s.where.world_size > 1 and actor.strategy == "single":
        yield Finding(
            field="actor_rollout_ref.actor.strategy",
            why=f"`single` trains on one device; nnodes x n_gpus_per_node = {s.where.world_size}",
            fix="set it to fsdp2 or auto",
        )


@rule("S03", "warning")
def ray_is_installed(s: Situation) -> Iterator[Finding]:
    """The Ray runtime has its package."""
    if s.where.runtime == "ray" and not s.installed("ray"):
        yield Finding(
            field="trainer.runtime",
            why="the run needs Ray, which is not installed on this machine",
            fix="pip install 'luyen[ray]', or set nnodes=1 and n_gpus_per_node=1",
        )


@rule("S04", "warning")
def frequencies_fit_the_run(s: Situation) -> Iterator[Finding]:
    """Saving and testing happen before the run is over."""
    trainer = s.config.trainer
    steps = trainer.total_training_steps
    for name, every in (("save_freq", trainer.save_freq), ("test_freq", trainer.test_freq)):
        if steps is not None and every > steps:
            yield Finding(
                field=f"trainer.{name}",
                why=f"every {every} steps never comes in a run of {steps}; only the end counts",
                fix=f"set it to at most {steps}, or to -1",
            )
    for name, every in (("save_freq", trainer.save_freq), ("test_freq", trainer.test_freq)):
        if every == 0:
            yield Finding(
                field=f"trainer.{name}", why="every 0 steps means nothing", fix="set -1 or a number"
            )


@rule("S05", "error")
def validation_has_rows(s: Situation) -> Iterator[Finding]:
    """Validation that is asked for has rows."""
    trainer, data = s.config.trainer, s.config.data
    if data.val_files:
        return
    asked = [
        name
        for name, wanted in (
            ("test_freq", trainer.test_freq > 0),
            (
                "val_before_train",
                trainer.val_before_train and "trainer.val_before_train" in s.written,
            ),
        )
        if wanted
    ]
    for name in asked:
        yield Finding(
            field=f"trainer.{name}",
            why="validation is asked for and data.val_files is empty",
            fix="set data.val_files, or drop this key",
        )


@rule("S06", "error")
def resume_path_is_given(s: Situation) -> Iterator[Finding]:
    """`resume_mode: path` names a checkpoint that exists, and only it does."""
    trainer = s.config.trainer
    path = trainer.resume_from_path
    if trainer.resume_mode == "path" and path is None:
        yield Finding(
            field="trainer.resume_from_path",
            why="resume_mode=path does not say from where",
            fix="set it to a checkpoint directory (.../checkpoints/step_N)",
        )
    if trainer.resume_mode == "path" and path and not is_directory(path):
        yield Finding(
            field="trainer.resume_from_path",
            why="no such directory on this machine",
            fix="give a checkpoint directory (.../checkpoints/step_N)",
        )
    if trainer.resume_mode != "path" and path is not None:
        yield Finding(
            field="trainer.resume_from_path",
            why=f"resume_mode={trainer.resume_mode} does not read it",
            fix="set resume_mode=path, or drop it",
        )


@rule("S07", "error")
def fresh_run_does_not_overwrite(s: Situation) -> Iterator[Finding]:
    """A run that does not resume does not write over an earlier one."""
    trainer = s.config.trainer
    saved = sorted(s.run_directory().glob("checkpoints/step_*"))
    if trainer.resume_mode == "disable" and saved:
        yield Finding(
            field="trainer.resume_mode",
            why=f"{s.run_directory()} holds {len(saved)} checkpoints of an earlier run",
            fix="set resume_mode=auto to go on, or choose another experiment_name",
        )


@rule("S08", "note")
def run_will_resume(s: Situation) -> Iterator[Finding]:
    """A run that finds its own checkpoints goes on from the newest."""
    saved = sorted(s.run_directory().glob("checkpoints/step_*"), key=_step)
    if s.config.trainer.resume_mode == "auto" and saved:
        yield Finding(
            field="trainer.resume_mode",
            why=f"the run will go on from {saved[-1]}",
            fix="choose another experiment_name to start afresh",
        )


def _step(checkpoint: Path) -> int:
    digits = checkpoint.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1


@rule("S09", "error")
def loggers_exist(s: Situation) -> Iterator[Finding]:
    """Each logger is known."""
    for name in s.config.trainer.logger:
        if name not in LOGGERS:
            why, fix = f"no logger `{name}`", did_you_mean(name, LOGGERS)
            yield Finding(field="trainer.logger", why=why, fix=fix)


@rule("S14", "warning")
def loggers_are_installed(s: Situation) -> Iterator[Finding]:
    """A logger that is a package of its own is installed where the check runs."""
    for name in s.config.trainer.logger:
        if name in ("wandb", "mlflow", "trackio") and not s.installed(name):
            why = f"the package {name} is not installed on this machine"
            fix = f"pip install {name}, or drop it; jsonl and tensorboard need nothing"
            yield Finding(field="trainer.logger", why=why, fix=fix)


@rule("S10", "error")
def actor_gets_to_learn(s: Situation) -> Iterator[Finding]:
    """Critic warm-up has a critic to warm up and leaves steps for the actor."""
    trainer = s.config.trainer
    if trainer.critic_warmup and not needs_critic(s.config, s.estimator):
        yield Finding(
            field="trainer.critic_warmup",
            why="the run has no critic: the policy would only wait",
            fix="drop it, or choose algorithm.adv_estimator=gae",
        )
    steps = trainer.total_training_steps
    if steps is not None and trainer.critic_warmup >= steps:
        yield Finding(
            field="trainer.critic_warmup",
            why=f"the policy would never be updated in a run of {steps} steps",
            fix=f"set it below {steps}",
        )


@rule("S11", "warning")
def steps_are_counted_once(s: Situation) -> Iterator[Finding]:
    """`total_epochs` is changed only when `total_training_steps` does not decide."""
    trainer = s.config.trainer
    if trainer.total_training_steps is not None and s.is_changed("trainer.total_epochs"):
        yield Finding(
            field="trainer.total_epochs",
            why=f"total_training_steps={trainer.total_training_steps} decides how long the run is "
            f"(total_epochs={trainer.total_epochs} has no effect)",
            fix="keep one of the two",
        )


@rule("S13", "warning")
def versions_are_supported(s: Situation) -> Iterator[Finding]:
    """torch and transformers are of versions that are tested."""
    for package, (first, beyond) in compat.SUPPORTED.items():
        version = s.versions(package)
        if version is not None and not compat.is_supported(package, version):
            yield Finding(
                field="trainer.device",
                why=f"{package} {version[0]}.{version[1]} is installed, and {first[0]}.{first[1]} "
                f"up to {beyond[0]}.{beyond[1] - 1} are tested",
                fix=f"pip install -c constraints.txt {package}",
            )


@rule("S15", "error")
def run_stays_in_its_folder(s: Situation) -> Iterator[Finding]:
    """The names of project and experiment are names, not paths out of the run folder."""
    trainer = s.config.trainer
    named = {"project_name": trainer.project_name, "experiment_name": trainer.experiment_name}
    for key, name in named.items():
        if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            why = "it is part of a folder's name and must not lead elsewhere"
            yield Finding(field=f"trainer.{key}", why=why, fix="use letters, digits, - and _")


@rule("S12", "error")
def plugins_are_readable(s: Situation) -> Iterator[Finding]:
    """Plugin files exist and are Python."""
    for path, reason in s.broken_plugins.items():
        why, fix = f"{path} {reason}", "mend the file or its path"
        yield Finding(field="trainer.plugins", why=why, fix=fix)
