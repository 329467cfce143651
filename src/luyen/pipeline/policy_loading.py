"""Load the policy of a checkpoint, run directory or Hugging Face model for inference."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.input_files import exists, expanded
from luyen.base.rundir import RunDirectory, step_of
from luyen.checkpoint.store import Checkpoint, CheckpointStore, verify
from luyen.checkpoint.tensors import load_state
from luyen.config.loader.load import load
from luyen.config.loader.one_reading import one_reading
from luyen.config.loader.parse import parse, remember_secrets
from luyen.config.machine import this_machine
from luyen.config.model_folder.check import demand_adapter_config, sound, trained_settings
from luyen.config.model_folder.files import path_fault
from luyen.config.plan import plan_placement
from luyen.config.schema.actor_rollout_ref import ValKwargsConfig
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.reward import RewardConfig
from luyen.config.schema.run import RunConfig
from luyen.config.trust import require_trust
from luyen.data.tokenizer import Tokenizer
from luyen.models.load import choose_threads, load_policy
from luyen.models.policy import Policy
from luyen.train.builders.setup import import_plugins, load_run_tokenizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOverrides:
    """Command-line overrides of an evaluation; None keeps the configured value.

    Example:
        >>> config = eval_config(RunConfig(), EvalOverrides(samples=8))
        >>> val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
        >>> val_kwargs.n, val_kwargs.do_sample, val_kwargs.temperature
        (8, True, 1.0)
    """

    samples: int | None = None
    """Samples per prompt; more than one turns sampling on."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Nucleus sampling mass."""
    min_p: float | None = None
    """Least probability of a token, relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; empty: those of the configuration."""
    data: tuple[str, ...] = ()
    """Files to evaluate on."""
    reward: str | None = None
    """A single reward rule that replaces the configured reward."""


def eval_config(config: RunConfig, overrides: EvalOverrides) -> RunConfig:
    """The configuration of an evaluation; scores that cannot be computed are dropped."""
    reward = config.reward
    if overrides.reward is not None:
        reward = RewardConfig(components={overrides.reward: {"rule": overrides.reward}})
    reward = reward.model_copy(update={"on_fault": "drop"})
    data = config.data
    if overrides.data:
        data = data.model_copy(update={"val_files": overrides.data})
    arr = config.actor_rollout_ref
    rollout = arr.rollout.model_copy(update={"val_kwargs": _val_kwargs(config, overrides)})
    arr = arr.model_copy(update={"rollout": rollout})
    return config.model_copy(update={"reward": reward, "data": data, "actor_rollout_ref": arr})


def with_model_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """The configuration with the model of another; rows, reward and sampling stay."""
    model = other.actor_rollout_ref.model
    arr = config.actor_rollout_ref.model_copy(update={"model": model})
    return config.model_copy(update={"actor_rollout_ref": arr})


def _val_kwargs(config: RunConfig, overrides: EvalOverrides) -> ValKwargsConfig:
    rollout = config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    filters = {"top_p": overrides.top_p, "min_p": overrides.min_p}
    given: dict[str, object] = {name: v for name, v in filters.items() if v is not None}
    stop: dict[str, object] = {"stop": overrides.stop} if overrides.stop else {}
    is_sampling = (overrides.samples or 1) > 1 or bool(given)
    if overrides.temperature == 0:
        if is_sampling:
            why = "temperature 0 is greedy, and the other options request sampling"
            raise UserError(
                "--temperature", 0, why, "raise it, or drop --samples, --top-p, --min-p"
            )
        return val_kwargs.model_copy(update={"n": 1, "do_sample": False, **stop})
    changes = {**given, **stop} | ({} if overrides.samples is None else {"n": overrides.samples})
    if is_sampling or overrides.temperature is not None:
        own = val_kwargs.temperature if val_kwargs.do_sample else 0.0
        changes |= {
            "do_sample": True,
            "temperature": overrides.temperature or own or rollout.temperature or 1.0,
        }
    return val_kwargs.model_copy(update=changes)


_FIELD = "CHECKPOINT"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = "actor_rollout_ref.model"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPolicy:
    """A policy loaded for inference, with its configuration and tokenizer.

    Example:
        >>> config = RunConfig()
        >>> LoadedPolicy(config=config, policy=None, tokenizer=None, name="a/b", step=7).step
        7
    """

    config: RunConfig
    """The run's configuration; defaults where there is no run."""
    policy: Policy
    """The model with the checkpoint's weights, adapter unmerged, all parameters frozen."""
    tokenizer: Tokenizer
    """Its tokenizer."""
    name: str
    """Where it was loaded from, for display."""
    step: int | None
    """Steps it was trained for; None for a Hugging Face model."""


def open_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    files: Sequence[Path] = (),
    keep_dtype: bool = False,
    is_trusted: bool = False,
) -> LoadedPolicy:
    """Load the policy of a checkpoint, a run directory (newest valid checkpoint) or a HF model.

    Files of a checkpoint are verified against their hashes. `overrides` are `key=value` on top of
    the run's configuration; `files` replace it for everything but the model. With `keep_dtype`
    weights keep the dtype they were saved in; otherwise it is chosen for this machine. Another
    user's run that names code is refused unless `is_trusted`.
    """
    config, found = checkpoint_config(path, overrides, files=files, is_trusted=is_trusted)
    if found is None:
        return _load(config, path, None, None, keep_dtype=keep_dtype)
    weights: dict[str, Tensor] = load_state(found.path, "actor")
    return _load(config, str(found.path), found.step, weights, keep_dtype=keep_dtype)


@one_reading()
def checkpoint_config(
    path: str,
    overrides: Sequence[str] = (),
    *,
    files: Sequence[Path] = (),
    is_trusted: bool = False,
) -> tuple[RunConfig, Checkpoint | None]:
    """The configuration of what `open_checkpoint` would load, and its checkpoint if it has one."""
    found = find_checkpoint(path)
    if found is None:
        return read_config(files, [*_model_keys(path), *overrides]), None
    file = found.path.parent.parent / "config.yaml"
    if not file.is_file():
        why = f"a checkpoint holds weights, and what they are weights of stands in {file}"
        raise UserError(_FIELD, path, why, "leave checkpoints inside their run directory")
    require_trust(RunDirectory(file.parent), is_trusted=is_trusted)
    RunDirectory(file.parent).read_config()  # a UserError where it is not as it was written
    config = read_config([file], overrides)
    if config.trainer.stage == "reward_model":
        why = "it holds a reward model, which judges answers and gives none"
        raise UserError(_FIELD, path, why, "give it to a run as reward.reward_model.model_path")
    if files:
        config = with_model_of(read_config(files, overrides), config)
    return config, found


def open_initial_policy(config: RunConfig) -> LoadedPolicy:
    """The policy that a run with this configuration would start from."""
    name = config.actor_rollout_ref.model.path
    return _load(config, name, None, None, keep_dtype=False)


def find_checkpoint(path: str) -> Checkpoint | None:
    """The checkpoint at a path; None for a Hugging Face model."""
    wrong = path_fault(path)
    if wrong is not None:
        raise UserError(_FIELD, path, *wrong)
    folder = expanded(path)
    if (folder / "actor.json").is_file() or _is_of_run(folder):
        return verify(folder)
    is_model = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    run = RunDirectory(folder)
    if run.exists or (run.checkpoints.is_dir() and not is_model):
        RunDirectory.open(folder)  # a UserError where its manifest is not sound
        newest = CheckpointStore(run.checkpoints).newest_sound()
        if newest is None:
            why = "the run has no sound checkpoint yet"
            raise UserError(_FIELD, path, why, "let it reach trainer.save_freq or its end")
        return newest
    is_hub_id = _HUB_ID.fullmatch(path) and not exists(path.partition("/")[0])
    if path.startswith("builtin://") or is_model or is_hub_id:
        return None
    why = "no checkpoint there" if folder.exists() else "no such folder"
    fix = "give runs/PROJECT/EXPERIMENT, a folder below its checkpoints/, or a model directory"
    raise UserError(_FIELD, path, why, fix)


def _is_of_run(folder: Path) -> bool:
    """Whether a folder has the path of a run's checkpoint; its files may be missing."""
    return step_of(folder.name) is not None and folder.parent.name == "checkpoints"


def read_config(files: Sequence[Path], overrides: Sequence[str]) -> RunConfig:
    """Read a configuration; a UserError for the first invalid key or value.

    The rules of `check` are not applied: they concern a run that starts on this machine.
    """
    tree = load(files, overrides)
    parsed = parse(tree)
    for problem in (*tree.problems, *parsed.problems):
        if problem.severity == "error":
            raise UserError(problem.field, problem.value, problem.why, problem.fix)
    remember_secrets(parsed.config)
    return parsed.config


def device_for(config: RunConfig) -> str:
    """The configured device, or cpu where this machine lacks it."""
    wanted = plan_placement(config, this_machine(), None).device
    return wanted if wanted == "cpu" or torch.cuda.is_available() else "cpu"


def _model_keys(path: str) -> list[str]:
    """Overrides for a Hugging Face model, or for an adapter directory and its base model."""
    folder = expanded(path)
    if not (folder / "adapter_config.json").is_file():
        return [f"{_PATH}.path={json.dumps(path)}"]
    adapter = sound(lambda: demand_adapter_config(folder), field=_FIELD, path=path)
    named = adapter["target_modules"]
    modules = [named] if isinstance(named, str) else sorted(named)
    return [
        f"{_PATH}.path={json.dumps(adapter['base_model_name_or_path'])}",
        f"{_PATH}.lora_rank={adapter['r']}",
        *(f"{_PATH}.{k}={json.dumps(v)}" for k, v in trained_settings(adapter).items()),
        f"{_PATH}.target_modules={json.dumps(modules)}",
        f"{_PATH}.lora_adapter_path={json.dumps(path)}",
    ]


def _load(
    config: RunConfig,
    name: str,
    step: int | None,
    weights: Mapping[str, Tensor] | None,
    *,
    keep_dtype: bool,
) -> LoadedPolicy:
    import_plugins(config.trainer.plugins)  # the tokenizer may need a plugin's tool-call format
    tokenizer = load_run_tokenizer(config)
    model = _for_inference(config.actor_rollout_ref.model, weights if keep_dtype else None)
    policy = load_policy(
        model,
        device=device_for(config),
        vocabulary=tokenizer.size,
        may_be_plain=True,
    )
    choose_threads(policy)
    if weights is not None:
        _copy_weights(policy, weights, name)
    policy.requires_grad_(False)
    return LoadedPolicy(config=config, policy=policy, tokenizer=tokenizer, name=name, step=step)


def _for_inference(model: ModelConfig, weights: Mapping[str, Tensor] | None) -> ModelConfig:
    """The model block without training options, and with the dtype of `weights` if given."""
    changes: dict[str, object] = {"enable_gradient_checkpointing": False}
    if weights and next(iter(weights.values())).dtype == torch.bfloat16:
        changes["dtype"] = "bfloat16"
    return model.model_copy(update=changes)


def _copy_weights(policy: Policy, weights: Mapping[str, Tensor], name: str) -> None:
    """Copy trained weights; frozen ones were loaded with the model."""
    own = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    if own.keys() != weights.keys() or any(own[n].shape != w.shape for n, w in weights.items()):
        why = "its weights are not those of the model that its config.yaml names"
        fix = "restore the model that actor_rollout_ref.model.path named, or correct the override"
        raise UserError(_FIELD, name, why, fix)
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(weights[key])
