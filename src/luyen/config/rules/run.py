"""S, N: devices, steps, validation, logging, saving, profiling, watchdog, resuming."""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from luyen.base import process_setup
from luyen.base.errors import UserError, did_you_mean
from luyen.base.heartbeat import PHASES
from luyen.base.input_files import exists, expanded, is_directory
from luyen.base.rundir import RunDirectory
from luyen.config.catalog import training_engine
from luyen.config.plan import needs_critic
from luyen.config.plugins import LOGGERS
from luyen.config.resume import ChangedKey, changed_keys, has_progress
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.telemetry.remote_sinks import missing_packages

_LONGEST_NAME = 200
"""Bytes of a folder's name. File systems take 255, and what is unfinished has a longer name."""
_LONGEST_PATH = 3500
"""Bytes of a path to a run. The system limit is 4096, and files are below it."""


@rule("S01", "error")
def device_exists(s: RuleContext) -> Iterator[Finding]:
    """A local run on CUDA has a GPU; on Ray the devices of the cluster are counted at its start."""
    gpus = len(s.machine.gpu_bytes)
    if s.config.trainer.device == "cuda" and s.where.runtime == "local" and gpus == 0:
        yield Finding(
            field="trainer.device",
            why=f"a GPU is required and this machine has {gpus}",
            fix="set trainer.device=cpu or auto, or run the check where the GPUs are",
        )


@rule("S02", "error")
def runtime_spans_the_devices(s: RuleContext) -> Iterator[Finding]:
    """More than one device needs the Ray runtime and a sharded training engine."""
    trainer, actor = s.config.trainer, s.config.actor_rollout_ref.actor
    ranks = max(s.where.rank_groups)
    if ranks == 1:
        return
    if trainer.runtime == "local" and s.where.world_size > 1:
        yield Finding(
            field="trainer.runtime",
            why=f"local is one process; nnodes x n_gpus_per_node = {s.where.world_size}",
            fix="drop it (Ray is then used), or set nnodes=1 and n_gpus_per_node=1",
        )
    engine = s.known.training_engines.get(training_engine(actor.strategy, ranks))
    if engine is not None and not engine.splits:
        yield Finding(
            field="actor_rollout_ref.actor.strategy",
            why=f"`{actor.strategy}` trains on one device; nnodes x n_gpus_per_node = {ranks}",
            fix="set it to fsdp2 or auto",
        )


@rule("S03", "error")
def ray_is_installed(s: RuleContext) -> Iterator[Finding]:
    """The Ray runtime has its package."""
    if s.where.runtime == "ray" and not s.installed("ray"):
        yield Finding(
            field="trainer.runtime",
            why="the run needs Ray, which is not installed on this machine",
            fix="pip install 'luyen[ray]', or set nnodes=1 and n_gpus_per_node=1",
        )


@rule("S04", "warning")
def frequencies_fit_the_run(s: RuleContext) -> Iterator[Finding]:
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
def validation_has_rows(s: RuleContext) -> Iterator[Finding]:
    """Validation that is enabled has rows."""
    trainer, data = s.config.trainer, s.config.data
    if data.val_files:
        return
    enabled = [
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
    for name in enabled:
        yield Finding(
            field=f"trainer.{name}",
            why="validation is enabled and data.val_files is empty",
            fix="set data.val_files, or drop this key",
        )


@rule("S09", "error")
def loggers_exist(s: RuleContext) -> Iterator[Finding]:
    """Each logger is known."""
    for name in s.config.trainer.logger:
        if name not in LOGGERS:
            why, fix = f"no logger `{name}`", did_you_mean(name, LOGGERS)
            yield Finding(field="trainer.logger", why=why, fix=fix)


@rule("S14", "error")
def loggers_are_installed(s: RuleContext) -> Iterator[Finding]:
    """A logger that is a package of its own is installed where the check runs."""
    for name in s.config.trainer.logger:
        lacking = missing_packages(name, s.installed)
        if lacking is not None:
            yield Finding(field="trainer.logger", why=lacking[0], fix=lacking[1])


@rule("S10", "error")
def actor_gets_to_learn(s: RuleContext) -> Iterator[Finding]:
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
def steps_are_counted_once(s: RuleContext) -> Iterator[Finding]:
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
def versions_are_supported(s: RuleContext) -> Iterator[Finding]:
    """torch and transformers are of versions that are tested."""
    for package, (first, beyond) in process_setup.SUPPORTED.items():
        version = s.versions(package)
        if version is not None and not process_setup.is_supported(package, version):
            yield Finding(
                field="trainer.device",
                why=f"{package} {version[0]}.{version[1]} is installed, and {first[0]}.{first[1]} "
                f"up to {beyond[0]}.{beyond[1] - 1} are tested",
                fix=f"pip install -c constraints.txt {package}",
            )


@rule("S15", "error")
def run_stays_in_its_folder(s: RuleContext) -> Iterator[Finding]:
    """The names of project and experiment are names, not paths out of the run folder."""
    trainer = s.config.trainer
    named = {"project_name": trainer.project_name, "experiment_name": trainer.experiment_name}
    for key, name in named.items():
        if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            why = "it is part of a folder's name and must not contain a path"
            yield Finding(field=f"trainer.{key}", why=why, fix="use letters, digits, - and _")
        elif any(unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp") for one in name):
            why = "it holds a line break or another character that is not shown"
            yield Finding(field=f"trainer.{key}", why=why, fix="use letters, digits, - and _")
        elif len(name.encode(errors="surrogatepass")) > _LONGEST_NAME:
            why = f"it is longer than {_LONGEST_NAME} bytes, which no folder's name may be"
            yield Finding(field=f"trainer.{key}", why=why, fix="shorten it")


@rule("S23", "error")
def run_folder_can_be_made(s: RuleContext) -> Iterator[Finding]:
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
def plugins_are_readable(s: RuleContext) -> Iterator[Finding]:
    """Plugin files exist, are Python, and register names that are free."""
    for path, reason in s.broken_plugins.items():
        why, fix = f"{path} {reason}", "correct the file or its path"
        yield Finding(field="trainer.plugins", why=why, fix=fix)


# S: retention of checkpoints.

_VALIDATION = "val/"


@rule("S21", "warning")
def best_ones_are_chosen(s: RuleContext) -> Iterator[Finding]:
    """`keep_best` has an effect: some checkpoints are deleted, and some best ones are kept."""
    trainer = s.config.trainer
    if trainer.keep_best and trainer.max_ckpt_to_keep is None:
        why = "every checkpoint stays, since max_ckpt_to_keep is not set"
        fix = "set trainer.max_ckpt_to_keep, or drop it"
        yield Finding(field="trainer.keep_best", why=why, fix=fix)
    for key in ("best_metric", "best_mode"):
        if not trainer.keep_best and s.is_changed(f"trainer.{key}"):
            why, fix = "keep_best is 0: no checkpoint is best", "set trainer.keep_best, or drop it"
            yield Finding(field=f"trainer.{key}", why=why, fix=fix)


@rule("S22", "error")
def best_metric_is_measured(s: RuleContext) -> Iterator[Finding]:
    """The metric that decides which checkpoints stay is one that the run measures."""
    trainer = s.config.trainer
    if not trainer.keep_best or not trainer.best_metric.startswith(_VALIDATION):
        return
    if trainer.stage != "rl":
        why = f"a run of the stage {trainer.stage} measures no such metric"
        fix = "set it to one that it does, e.g. sft/val_nll or preference/val_accuracy"
        yield Finding(field="trainer.best_metric", why=why, fix=fix)
    elif not s.config.data.val_files:
        why = "data.val_files is empty: nothing measures it, and no checkpoint would be best"
        fix = "set data.val_files, or a metric of training such as reward/mean"
        yield Finding(field="trainer.best_metric", why=why, fix=fix)


# S: profiling.

_STEPS = "trainer.profile.steps"


@rule("S16", "error")
def profiled_steps_are_steps(s: RuleContext) -> Iterator[Finding]:
    """Profiled steps are counted from 1."""
    wrong = [step for step in s.config.trainer.profile.steps if step < 1]
    if wrong:
        yield Finding(field=_STEPS, why=f"there is no step {wrong[0]}", fix="count from 1")


@rule("S17", "warning")
def profiled_steps_are_reached(s: RuleContext) -> Iterator[Finding]:
    """Profiled steps come before the run is over."""
    trainer = s.config.trainer
    total = trainer.total_training_steps
    late = [step for step in trainer.profile.steps if total is not None and step > total]
    if late:
        why = f"step {late[0]} never comes in a run of {total}"
        yield Finding(field=_STEPS, why=why, fix=f"name steps up to {total}")


@rule("S18", "warning")
def profile_has_steps(s: RuleContext) -> Iterator[Finding]:
    """Keys of the profile are changed only when steps are profiled."""
    profile = s.config.trainer.profile
    for name in ("memory", "save_path"):
        if not profile.steps and s.is_changed(f"trainer.profile.{name}"):
            yield Finding(
                field=f"trainer.profile.{name}",
                why="no step is profiled, so it has no effect",
                fix=f"set {_STEPS}, or drop it",
            )


# S: watchdog.

_BUDGETS = "trainer.watchdog.budgets"


@rule("S19", "error")
def watched_phases_exist(s: RuleContext) -> Iterator[Finding]:
    """Budgets of the watchdog are those of phases, and no time is negative."""
    for name, seconds in s.config.trainer.watchdog.budgets.items():
        if name not in PHASES:
            why, fix = f"a run has no phase `{name}`", did_you_mean(name, PHASES)
            yield Finding(field=_BUDGETS, why=why, fix=fix)
        if seconds < 0:
            why = f"{name} cannot hang for {seconds:g} s"
            yield Finding(field=_BUDGETS, why=why, fix="give seconds, or 0 to leave it unwatched")


@rule("S20", "warning")
def policy_has_a_watchdog(s: RuleContext) -> Iterator[Finding]:
    """`on_hang` is changed only where something is watched."""
    watchdog = s.config.trainer.watchdog
    is_off = not watchdog.budget_s and not any(watchdog.budgets.values())
    if is_off and watchdog.on_hang == "stop":
        why = "no phase has a budget, so that nothing is ever found to hang"
        yield Finding(field="trainer.watchdog.on_hang", why=why, fix="set budget_s, or drop it")


# S: timeouts of a cluster.


@rule("S25", "warning")
def timeouts_have_processes(s: RuleContext) -> Iterator[Finding]:
    """Timeouts are changed only where roles have processes of their own."""
    for name in type(s.config.trainer.timeouts).model_fields:
        field = f"trainer.timeouts.{name}"
        if s.where.runtime == "local" and s.is_changed(field):
            why = "the run is one process, so that it waits for no other and it has no effect"
            yield Finding(field=field, why=why, fix="drop the line, or set trainer.runtime to ray")


# S: starting a run, resuming it, and conflicts with an earlier run of the same name.

_AFRESH = "choose another trainer.experiment_name"
_FORK = (
    "choose another trainer.experiment_name; to begin it with what this run has learned, also set "
    "trainer.resume_mode=path and trainer.resume_from_path={checkpoint}"
)
_OTHER_WEIGHTS = ("actor_rollout_ref.model.", "critic.model.", "trainer.stage")
"""Keys with which the weights of a checkpoint do not fit any more."""


@rule("S06", "error")
def resume_path_is_given(s: RuleContext) -> Iterator[Finding]:
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
def fresh_run_does_not_overwrite(s: RuleContext) -> Iterator[Finding]:
    """A run that does not resume does not write over an earlier one."""
    saved, run = _saved(s), _run_there(s)
    if s.config.trainer.resume_mode == "disable" and (saved or run is not None):
        found = f"{len(saved)} checkpoints of an earlier run" if saved else "an earlier run"
        yield Finding(
            field="trainer.resume_mode",
            why=f"{s.run_directory()} holds {found}",
            fix="set resume_mode=auto to resume it, or choose another experiment_name",
        )


@rule("S08", "note")
def run_will_resume(s: RuleContext) -> Iterator[Finding]:
    """A run that finds its own checkpoints resumes from the newest; changed keys are listed."""
    saved = _saved(s)
    if s.config.trainer.resume_mode != "auto" or not saved:
        return
    changes = _changes(s)
    if any(one.kind is None for one in changes):
        return  # it will not: S24 says why
    total = s.config.trainer.total_training_steps
    if total is not None and _step(saved[-1]) >= total:
        yield Finding(
            field="trainer.resume_mode",
            why=f"the run in {s.run_directory()} has all of its {total} steps: "
            "nothing is left to do",
            fix="choose another experiment_name to start a new run, or raise total_training_steps",
        )
        return
    changed = [one.words() for one in changes if one.kind != "place"]
    with_what = f", with {', '.join(changed)}" if changed else ""
    yield Finding(
        field="trainer.resume_mode",
        why=f"the run will resume from {saved[-1]}{with_what}",
        fix="choose another experiment_name to start a new run",
    )


@rule("S24", "error")
def run_goes_on_as_it_is(s: RuleContext) -> Iterator[Finding]:
    """A resumed run has the model, rows, reward and algorithm that it began with."""
    if s.config.trainer.resume_mode == "disable":
        return  # S07 speaks about it
    newest = [*_saved(s), s.run_directory() / "checkpoints" / "step_N"]
    fix = _FORK.format(checkpoint=newest[-2] if len(newest) > 1 else newest[-1])
    for one in _changes(s):
        if one.kind is None:
            yield Finding(
                field=one.key,
                why=f"the run in {s.run_directory()} has {one.before!r}, and would be another one",
                fix=_AFRESH if one.key.startswith(_OTHER_WEIGHTS) else fix,
            )


def _changes(s: RuleContext) -> list[ChangedKey]:
    """What is not as in the run that is there; nothing where it has done nothing yet."""
    run = _run_there(s)
    return changed_keys(run, s.config) if run is not None and has_progress(run) else []


def _run_there(s: RuleContext) -> RunDirectory | None:
    try:
        run = RunDirectory(s.run_directory())
        is_there = run.exists
    except (OSError, ValueError, UserError):  # a name that no folder can have
        return None
    return run if is_there else None


def _saved(s: RuleContext) -> list[Path]:
    """Checkpoints that are there already, the newest last."""
    try:
        return sorted(s.run_directory().glob("checkpoints/step_*"), key=_step)
    except (OSError, ValueError):  # a name that no folder can have
        return []


def _step(checkpoint: Path) -> int:
    digits = checkpoint.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1
