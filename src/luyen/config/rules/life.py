"""S: the life of a run: devices, steps, validation, saving, logging."""

import os
from collections.abc import Iterator

from luyen.base import compat
from luyen.base.paths import exists, expanded, is_directory
from luyen.base.suggest import did_you_mean
from luyen.config.plan import needs_critic
from luyen.config.plugins import LOGGERS
from luyen.config.rules.rule import Finding, Situation, rule

_LONGEST_NAME = 200
"""Bytes of a folder's name. File systems take 255, and what is unfinished has a longer name."""
_LONGEST_PATH = 3500
"""Bytes of a path to a run. The system takes 4096, and files lie below."""


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
    if trainer.stage != "rl" or s.where.world_size == 1:
        return  # an offline stage has one device, which N01 says
    if trainer.runtime == "local":
        yield Finding(
            field="trainer.runtime",
            why=f"local is one process; nnodes x n_gpus_per_node = {s.where.world_size}",
            fix="drop it (Ray is then used), or set nnodes=1 and n_gpus_per_node=1",
        )
    if actor.strategy == "single":
        yield Finding(
            field="actor_rollout_ref.actor.strategy",
            why=f"`single` trains on one device; nnodes x n_gpus_per_node = {s.where.world_size}",
            fix="set it to fsdp2 or auto",
        )


@rule("S03", "error")
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


@rule("S09", "error")
def loggers_exist(s: Situation) -> Iterator[Finding]:
    """Each logger is known."""
    for name in s.config.trainer.logger:
        if name not in LOGGERS:
            why, fix = f"no logger `{name}`", did_you_mean(name, LOGGERS)
            yield Finding(field="trainer.logger", why=why, fix=fix)


@rule("S14", "error")
def loggers_are_installed(s: Situation) -> Iterator[Finding]:
    """A logger that is a package of its own is installed where the check runs."""
    for name in s.config.trainer.logger:
        if name in ("wandb", "mlflow", "trackio") and not s.installed(name):
            why = f"the package {name} is not installed on this machine"
            fix = f"pip install {name}, or drop it; metrics.jsonl is written anyway"
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
        elif len(name.encode(errors="surrogatepass")) > _LONGEST_NAME:
            why = f"it is longer than {_LONGEST_NAME} bytes, which no folder's name may be"
            yield Finding(field=f"trainer.{key}", why=why, fix="shorten it")


@rule("S23", "error")
def run_folder_can_be_made(s: Situation) -> Iterator[Finding]:
    """The folder of all runs is one, or can become one."""
    field, written = "trainer.default_local_dir", s.config.trainer.default_local_dir
    above = expanded(written).absolute() if "\0" not in written else None
    if above is None or (written.startswith("~") and str(expanded(written)).startswith("~")):
        why = "no folder can be called so" if above is None else "there is no such user"
        yield Finding(field=field, why=why, fix="give the path of a folder")
        return
    if len(str(s.run_directory().absolute()).encode(errors="surrogatepass")) > _LONGEST_PATH:
        why = f"the path of the run is longer than {_LONGEST_PATH} bytes"
        yield Finding(field=field, why=why, fix="choose a shorter one")
        return
    if max(len(os.fsencode(part)) for part in above.parts) > _LONGEST_NAME:
        why = f"the name of one of its folders is longer than {_LONGEST_NAME} bytes"
        yield Finding(field=field, why=why, fix="choose a shorter one")
        return
    there = next(path for path in (above, *above.parents) if exists(str(path)))
    if not is_directory(str(there)):
        yield Finding(field=field, why=f"{there} is no folder", fix="give the path of a folder")


@rule("S12", "error")
def plugins_are_readable(s: Situation) -> Iterator[Finding]:
    """Plugin files exist, are Python, and register names that are free."""
    for path, reason in s.broken_plugins.items():
        why, fix = f"{path} {reason}", "mend the file or its path"
        yield Finding(field="trainer.plugins", why=why, fix=fix)
