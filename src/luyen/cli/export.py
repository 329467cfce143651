"""`luyen export`: a checkpoint as a Hugging Face directory."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from luyen.base.errors import UserError
from luyen.base.files import temporary_beside
from luyen.cli.quiet import prepare

if TYPE_CHECKING:
    from luyen.train.checkpointed import Opened


def run_export(checkpoint: str, directory: Path, *, merge: bool) -> int:
    """Write the directory, whole or not at all."""
    directory = directory.expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("DIR", str(directory), "it is not empty", "give a new directory")
    prepare()
    from luyen.train.checkpointed import open_checkpoint

    opened = open_checkpoint(checkpoint, keep_dtype=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = temporary_beside(directory)
    try:
        unfinished.mkdir()
        what = _fill(opened, unfinished, merge=merge)
        if directory.exists():
            directory.rmdir()
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    typer.echo(f"{opened.name} -> {directory}: {what}")
    for file in sorted(directory.iterdir()):
        typer.echo(f"  {file.name:28s} {file.stat().st_size:>12,d} bytes")
    return 0


def _fill(opened: "Opened", folder: Path, *, merge: bool) -> str:
    """Write everything into an empty folder, and say what it is."""
    from luyen.models.export import (
        adapter_layers,
        export_adapter,
        export_merged,
        export_model,
        export_tokenizer,
    )

    model, stop_ids = opened.config.actor_rollout_ref.model, opened.tokenizer.stop_ids
    has_adapter = bool(adapter_layers(opened.policy.model))
    if merge and not has_adapter:
        why, fix = "the checkpoint has no adapter to merge", "drop --merge"
        raise UserError("--merge", True, why, fix)
    if merge:
        export_merged(opened.policy, model.path, folder, stop_ids=stop_ids)
        what = "a whole model, the adapter merged"
    elif has_adapter:
        export_adapter(opened.policy, model.path, folder)
        what = f"an adapter for {model.path}"
    else:
        export_model(opened.policy, folder, stop_ids=stop_ids)
        what = "a whole model"
    export_tokenizer(model.tokenizer_path or model.path, folder)
    return what
