"""M: the files of models, tokenizers and adapters, as far as they can be read without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from luyen.base.paths import is_directory
from luyen.base.suggest import did_you_mean
from luyen.config.model_folder.adapter import adapter_faults
from luyen.config.model_folder.check import (
    folder_remarks,
    model_faults,
    tokenizer_folder_faults,
)
from luyen.config.model_folder.files import UnsoundFile
from luyen.config.model_folder.locate import builtin_names, folder_of, looks_local, path_fault
from luyen.config.rules.rule import Finding, Situation, rule

_MODEL = "actor_rollout_ref.model"
_OVERRIDE = f"{_MODEL}.override_config"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A path that a key names, and what of it is read.

    Example:
        >>> _Use(path="org/name").has_weights
        True
    """

    path: str | None
    """As it is written; None where nothing is named."""
    has_weights: bool = True
    """Whether weights are read."""
    has_head: bool = True
    """Whether they write tokens."""
    has_tokenizer: bool = False
    """Whether the tokenizer beside them is read."""
    is_adapter: bool = False
    """Whether they are an adapter's."""
    override: tuple[tuple[str, Any], ...] = ()
    """Values that replace those of the config."""


def _uses(s: Situation) -> dict[str, _Use]:
    """Key -> what is read of the model it names."""
    arr, model = s.config.actor_rollout_ref, s.config.actor_rollout_ref.model
    override = tuple(model.override_config.items())
    is_judge = s.config.trainer.stage == "reward_model"
    return {
        f"{_MODEL}.path": _Use(
            path=model.path,
            has_weights=model.init == "pretrained",
            has_head=not is_judge,
            has_tokenizer=model.tokenizer_path is None,
            override=override,
        ),
        f"{_MODEL}.tokenizer_path": _Use(
            path=model.tokenizer_path, has_weights=False, has_tokenizer=True
        ),
        f"{_MODEL}.lora_adapter_path": _Use(path=model.lora_adapter_path, is_adapter=True),
        "critic.model.path": _Use(path=s.config.critic.model.path, override=override),
        "actor_rollout_ref.ref.path": _Use(path=arr.ref.path, override=override),
        "distill.teacher_path": _Use(path=s.config.distill.teacher_path, has_tokenizer=True),
        "reward.reward_model.model_path": _Use(
            path=s.config.reward.reward_model.model_path, has_head=False, has_tokenizer=True
        ),
    }


@rule("M01", "error")
def model_exists(s: Situation) -> Iterator[Finding]:
    """Paths of models, tokenizers and adapters that look local are there."""
    for field, use in _uses(s).items():
        if use.path is None:
            continue
        if use.path.startswith("builtin://"):
            if use.path.removeprefix("builtin://") not in builtin_names():
                names = [f"builtin://{name}" for name in builtin_names()]
                fix = did_you_mean(use.path, names)
                yield Finding(field=field, why="no such model ships", fix=fix)
            continue
        wrong = path_fault(use.path)
        if wrong is not None:
            yield Finding(field=field, why=wrong[0], fix=wrong[1])
        elif looks_local(use.path) and not is_directory(use.path):
            yield Finding(
                field=field,
                why="no such directory on this machine",
                fix="give a model directory, a hub id such as org/name, or builtin://arithmetic",
            )


@rule("M06", "error")
def model_files_are_sound(s: Situation) -> Iterator[Finding]:
    """Config, weights, tokenizer and chat template of a model can be read and fit each other."""
    for field, use in _uses(s).items():
        folder = _folder(use.path)
        if folder is not None:
            faults = {fault.words: fault for fault in _faults(s, field, use, folder)}
            plain = replace(use, override=())
            own = (
                {fault.words for fault in _faults(s, field, plain, folder)}
                if faults
                else set[str]()
            )
            for words, fault in faults.items():
                # What is wrong only with the values that the run puts in is said of those.
                is_own = words in own or not use.override
                where, fix = (field, fault.fix) if is_own else (_OVERRIDE, f"mend {_OVERRIDE}")
                whose = "" if is_own else f"with it, {use.path} cannot be used: "
                yield Finding(field=where, why=f"{whose}{words}", fix=fix)


@rule("M07", "note")
def template_takes_what_rows_have(s: Situation) -> Iterator[Finding]:
    """The chat template writes system messages, and where the assistant begins to speak."""
    model = s.config.actor_rollout_ref.model
    folder = _folder(model.tokenizer_path or model.path)
    field = f"{_MODEL}.path" if model.tokenizer_path is None else f"{_MODEL}.tokenizer_path"
    if folder is not None and not _ships(model.tokenizer_path or model.path):
        for remark in folder_remarks(folder):
            fix = "mend the chat template, where that is not meant"
            yield Finding(field=field, why=remark, fix=fix)


def _folder(path: str | None) -> Path | None:
    """The folder to look into, where there is one."""
    if path is None or (not _ships(path) and path_fault(path) is not None):
        return None
    return folder_of(path)


def _ships(path: str | None) -> bool:
    """Whether a model comes with the package, and is sound as it is."""
    return path is not None and path.startswith("builtin://")


def _faults(s: Situation, field: str, use: _Use, folder: Path) -> list[UnsoundFile]:
    model = s.config.actor_rollout_ref.model
    if use.is_adapter:
        return adapter_faults(folder, rank=model.lora_rank) if model.lora_rank else []
    if field == f"{_MODEL}.tokenizer_path":
        override = dict(model.override_config)
        return tokenizer_folder_faults(folder, model=folder_of(model.path), override=override)
    override = dict(use.override)
    if _ships(use.path) and not override:
        return []
    found = model_faults(
        folder, override=override, has_weights=use.has_weights, has_head=use.has_head
    )
    if use.has_tokenizer:
        found += tokenizer_folder_faults(folder, model=folder, override=override)
    return found
