"""What a run reads and makes, noted as artifacts: rows, models, checkpoints, exports."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked_urls
from luyen.checkpoint.store import read_manifest
from luyen.config.model_folder.files import model_parts
from luyen.config.schema.run import RunConfig
from luyen.telemetry.artifact_registry import made_at, note
from luyen.telemetry.artifacts import (
    MISSING,
    NAME,
    NOTE,
    Artifact,
    Kind,
    current,
    hash_files,
    hash_of,
    not_noted,
    now,
    read_artifacts,
    require_unchanged,
    rewrite_artifacts,
)

_MODEL = "actor_rollout_ref.model"


def inputs_of(config: RunConfig, rows: Mapping[str, str]) -> list[Artifact]:
    """Datasets and models that a run reads, every file hashed.

    `rows` are row fingerprints by split, used for rows without a local file. An artifact of another
    run must be unchanged: a UserError names the changed file.
    """
    found = [*_datasets(config, rows), *models_of(config)]
    resumed = config.trainer.resume_from_path
    if config.trainer.resume_mode == "path" and resumed is not None:
        found.append(read_checkpoint("trainer.resume_from_path", expanded(resumed)))
    return found


def models_of(config: RunConfig, *, known: Container[str] = ()) -> list[Artifact]:
    """Models that a run reads, except those of the keys in `known`."""
    paths = {key: path for key, path in _models(config).items() if key not in known}
    kinds: dict[str, Kind] = {
        key: "reward_model" if key.startswith("reward.") else "model" for key in paths
    }
    return [_model(key, path, kinds[key]) for key, path in paths.items()]


def read_checkpoint(key: str, place: Path) -> Artifact:
    """A checkpoint that a run reads at a key, by the hashes of its manifest."""
    name = "/".join(place.resolve().parts[-4:])
    return _checkpoint(place, name=name, run="", parents=(), used_as=key)


def note_inputs(directory: RunDirectory, config: RunConfig, inputs: Sequence[Artifact]) -> None:
    """Note the inputs of a run that are not noted yet."""
    run, when = directory.run_id, now()
    found = [replace(one, run=run, made=when) for one in inputs]
    new = not_noted(directory.root / NAME, found)
    note(directory, new, expanded(config.trainer.default_local_dir))


def input_hashes(directory: RunDirectory) -> tuple[str, ...]:
    """Hashes of the inputs of a run: the parents of everything it produces."""
    noted = current(read_artifacts(directory.root / NAME))
    return tuple(dict.fromkeys(one.hash for one in noted if one.used_as is not None))


@final
class CheckpointNotes:
    """Notes checkpoints of a run as artifacts when they are saved and removed."""

    def __init__(self, directory: RunDirectory, root: Path) -> None:
        """`root` is the folder whose index lists the artifacts of all runs."""
        self._directory = directory
        self._root = root

    def kept(self, path: Path, going: Sequence[Path] = ()) -> None:
        """Note a saved checkpoint, and those in `going`, which are about to be removed."""
        note(self._directory, self._found([path], retired=going), self._root)

    def going(self, path: Path) -> None:
        """Note that a checkpoint is about to be removed."""
        note(self._directory, self._found(retired=[path]), self._root)

    def present(self, paths: Sequence[Path]) -> None:
        """Note existing checkpoints that a killed process did not note."""
        new = not_noted(self._directory.root / NAME, self._found(paths))
        note(self._directory, new, self._root)

    @cached_property
    def _parents(self) -> tuple[str, ...]:
        return input_hashes(self._directory)

    def _found(self, kept: Iterable[Path] = (), retired: Iterable[Path] = ()) -> list[Artifact]:
        """The checkpoints as artifacts; damaged ones are skipped, and reported on load."""
        found: list[Artifact] = []
        for path, is_retired in [*((p, False) for p in kept), *((p, True) for p in retired)]:
            name, run = f"{name_of(self._directory)}/{path.name}", self._directory.run_id
            try:
                made = _checkpoint(path, name=name, run=run, parents=self._parents)
            except UserError:
                continue
            found.append(replace(made, is_retired=is_retired))
        return found


def note_export(checkpoint: Path, folder: Path, kind: Kind) -> Artifact:
    """Note a model that was exported from a checkpoint, in the run and in the exported folder."""
    directory = RunDirectory(checkpoint.resolve().parent.parent)
    root = directory.root.parent.parent
    files = hash_files(folder)
    made = Artifact(
        kind=kind,
        name=name_of(directory),
        hash=hash_of(files),
        path=str(folder.resolve()),
        run=directory.run_id,
        parents=(hash_of(_manifest_hashes(checkpoint)),),
        made=now(),
        files=files,
    )
    # First in the model folder, which may be moved, and where it is kept if the run is read-only.
    rewrite_artifacts(folder / NOTE, lambda: [made])
    # Only runs create an index: this run directory may be a copy without one.
    note(directory, [made], root if (root / NAME).is_file() else None)
    return made


def name_of(directory: RunDirectory) -> str:
    """Name of a run's export: project/experiment."""
    return "/".join(directory.root.resolve().parts[-2:])


def _datasets(config: RunConfig, rows: Mapping[str, str]) -> Iterator[Artifact]:
    """One artifact per file, and one for all URLs of a split."""
    splits = {"train": config.data.train_files, "validation": config.data.val_files}
    for split, written in splits.items():
        key = "data.train_files" if split == "train" else "data.val_files"
        addresses = masked_urls(", ".join(path for path in written if "://" in path))
        if addresses:
            content = f"rows:{rows[split]}" if split in rows else MISSING
            yield _read("dataset", addresses, content, addresses, key)
        for number, path in enumerate(written):
            if "://" not in path:
                place = expanded(path).resolve()
                yield _read_files("dataset", place, f"{key}.{number}", hash_files(place))


def _models(config: RunConfig) -> dict[str, str]:
    """Paths of all models, by key."""
    arr, reward = config.actor_rollout_ref, config.reward
    paths = {
        f"{_MODEL}.path": arr.model.path,
        f"{_MODEL}.tokenizer_path": arr.model.tokenizer_path,
        f"{_MODEL}.lora_adapter_path": arr.model.lora_adapter_path,
        "actor_rollout_ref.ref.path": arr.ref.path,
        "critic.model.path": config.critic.model.path,
        "distill.teacher_path": config.distill.teacher_path,
        "reward.reward_model.model_path": reward.reward_model.model_path,
    }
    return {key: path for key, path in paths.items() if path is not None}


def _model(key: str, path: str, kind: Kind) -> Artifact:
    made = made_at(expanded(path))
    if made is not None:
        require_unchanged(made, key)
        return replace(made, used_as=key)
    parts = model_parts(path, Path.cwd())
    files = [file for found, _ in parts.values() for file in found]
    if not files:
        revision = parts.get("revision", ((), None))[1]
        return _read(kind, path, f"revision:{revision}" if revision else MISSING, path, key)
    home = files[0].parent.resolve()
    hashes = hash_files(home, sorted(file.name for file in files))
    return replace(_read_files(kind, home, key, hashes), name=path)


def _checkpoint(
    path: Path, *, name: str, run: str, parents: tuple[str, ...], used_as: str | None = None
) -> Artifact:
    """A checkpoint by the hashes in its manifest; its files are not read."""
    files = _manifest_hashes(path)
    return Artifact(
        kind="checkpoint",
        name=name,
        hash=hash_of(files),
        path=str(path.resolve()),
        run=run,
        parents=parents,
        made=now(),
        files=files,
        used_as=used_as,
    )


def _manifest_hashes(path: Path) -> dict[str, str]:
    listed = read_manifest(path)["files"]
    return {name: facts["sha256"] for name, facts in sorted(listed.items())}


def _read_files(kind: Kind, place: Path, key: str, files: Mapping[str, str]) -> Artifact:
    read = _read(kind, place.name, hash_of(files), str(place), key)
    return replace(read, files=files)


def _read(kind: Kind, name: str, content: str, path: str, key: str) -> Artifact:
    return Artifact(kind=kind, name=name, hash=content, path=path, run="", used_as=key)
