"""Whether a stage that was begun is still the one that the pipeline describes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.named_files import named_fingerprints
from luyen.config.resuming import kind_of
from luyen.config.schema.run import RunConfig
from luyen.config.tree import leaves
from luyen.config.written import stored
from luyen.telemetry.artifacts import Artifact, difference, short
from luyen.train.lineage import models_of

_MODEL_KEYS = ("path", "model_path", "lora_adapter_path", "teacher_path")


def require_same_stage(
    stage: str,
    directory: RunDirectory,
    config: RunConfig,
    noted: Sequence[Artifact],
    handed: Mapping[str, Artifact],
) -> None:
    """A UserError that names the first key, file or artifact that is another than before.

    `noted` is what the run has noted, `handed` what earlier stages give it now, by key.
    """
    changes: list[str] = [
        *_changed_keys(directory, config, handed),
        *_changed_inputs(noted, handed, models_of(config, known=handed)),
        *_changed_code(directory, config),
    ]
    if changes:
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        why = f"it was begun with something else: {changes[0]}{more}"
        fix = f"undo the change, give the stage another name, or remove {directory.root}"
        raise UserError("stage", stage, why, fix)


def _changed_keys(
    directory: RunDirectory, config: RunConfig, handed: Mapping[str, Artifact]
) -> Iterator[str]:
    before = _settings(directory.read_settings())
    now = _settings(stored(config))
    for key in sorted(before.keys() | now.keys()):
        is_free = kind_of(key) in ("place", "records")
        is_handed = any(one == key or one.startswith(f"{key}.") for one in handed)
        if not is_free and not is_handed and before.get(key) != now.get(key):
            yield f"{key} was {before.get(key)!r} and is {now.get(key)!r}"


def _settings(tree: Any) -> dict[str, Any]:
    return dict(leaves(tree))


def _changed_inputs(
    noted: Sequence[Artifact], handed: Mapping[str, Artifact], models: Sequence[Artifact]
) -> Iterator[str]:
    """`models` are those that no stage hands on, hashed now."""
    now = {one.used_as: one for one in models if one.files}
    for one in noted:
        if one.used_as is None:
            continue
        given = handed.get(one.used_as)
        if given is not None:
            how = f"{one.used_as} was {short(one.hash)} and is {short(given.hash)}"
            how = how if given.hash != one.hash else None
        else:
            how = _changed_files(one, now.get(one.used_as))
        if how is not None:
            yield how


def _changed_files(one: Artifact, now: Artifact | None) -> str | None:
    """How an input differs; `now` is what lies there, where it has files and was just hashed."""
    if now is None or not one.files:  # what has no files is believed: a hub's cache comes and goes
        return difference(one)
    if now.hash == one.hash:
        return None
    added = sorted(now.files.keys() - one.files.keys())
    return difference(one) or f"{Path(now.path) / added[0]} was added"


def _changed_code(directory: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Files that keys only name: rewards, plugins, tools. Models are among the artifacts."""
    before: dict[str, Any] = directory.read_manifest().get("files", {})
    now = named_fingerprints(config, folder=Path.cwd())
    for name, facts in now.items():
        is_model = any(f".{key}." in name for key in _MODEL_KEYS)
        was = before.get(name, {}).get("fingerprint")
        if not is_model and was is not None and was != facts["fingerprint"]:
            yield f"{facts['path']} has other content"
