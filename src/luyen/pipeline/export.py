"""Export a checkpoint as a Hugging Face directory, atomically, and note it in its run."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.files import in_progress, remove_abandoned_writes, temporary_path, writing
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.checkpoint.tensors import load_state
from luyen.config.schema.run import RunConfig
from luyen.config.trust import require_trust
from luyen.data.tokenizer import Tokenizer
from luyen.models.export import (
    export_adapter,
    export_merged,
    export_model,
    export_tokenizer,
)
from luyen.models.hf_loading import no_progress_bars
from luyen.models.lora import adapter_layers
from luyen.models.reward_model import load_reward_model, merge_adapter
from luyen.models.weights import restore_parameters
from luyen.pipeline.policy_loading import find_checkpoint, open_checkpoint, read_config
from luyen.telemetry.artifacts import Kind
from luyen.train.builders.setup import load_run_tokenizer
from luyen.train.lineage import note_export

_FIELD = "actor_rollout_ref.model.path"


def write_reward_model(config: RunConfig, checkpoint: Path, folder: Path) -> None:
    """Write a reward model for transformers; weights keep the dtype they were saved in.

    An adapter is merged into the weights below it.
    """
    weights: dict[str, Tensor] = load_state(checkpoint, "actor")
    is_half = any(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    form = {"dtype": "bfloat16" if is_half else "float32", "enable_gradient_checkpointing": False}
    block = config.actor_rollout_ref.model.model_copy(update=form)
    model = load_reward_model(block, device="cpu", field=_FIELD, new_head=config.trainer.seed)
    restore_parameters(model, weights)
    if block.lora_rank > 0:
        plain = block.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})
        adapted = model
        model = load_reward_model(plain, device="cpu", field=_FIELD, new_head=config.trainer.seed)
        merge_adapter(adapted, model)
    written: Any = model.net.config
    model.save(
        folder,
        pad_token=pad_token(load_run_tokenizer(config), written.get_text_config().pad_token_id),
        is_stepwise=config.reward_training.objective == "process",
    )


def pad_token(tokenizer: Tokenizer, of_model: int | None) -> int | None:
    """The padding token of the tokenizer, else of the model; None where it can end a sequence.

    transformers scores the last token that is not padding, so it would score the wrong token.
    """
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else of_model
    end = tokenizer.turn_end
    closing = tokenizer.encode(end.text + end.trailing) if end is not None else []
    last = {closing[-1]} if closing else {*tokenizer.stop_ids, tokenizer.unknown_id}
    return None if pad in last else pad


_SCORER = "reward_model"
_FIX_OUTPUT = "free disk space, correct the permissions, or name another directory"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """Result of an export.

    Example:
        >>> ExportedModel(source="runs/a/b/checkpoints/step_000002", what="a whole model").what
        'a whole model'
    """

    source: str
    """The exported checkpoint or model."""
    what: str
    """Description of the written model."""


def export_checkpoint(
    path: str, directory: Path, *, merge: bool | None, is_trusted: bool = False
) -> ExportedModel:
    """Export a checkpoint, or a run's newest valid one, into an empty or absent directory.

    `merge` None merges an adapter where there is one; that of a reward model is always merged, for
    it trains the score head too. Another user's run that names code is refused unless `is_trusted`.
    """
    found = find_checkpoint(path)
    if found is not None and (home := found.path.parent.parent / "config.yaml").is_file():
        require_trust(RunDirectory(home.parent), is_trusted=is_trusted)
    kind: Kind = "export"
    if found is not None and _stage_of(found.path) == _SCORER:
        kind, checkpoint = "reward_model", found.path
        made = _written(directory, lambda folder: _scorer(checkpoint, folder, merge))
    else:
        made = _written(directory, lambda folder: _policy(path, folder, merge, is_trusted))
    if found is not None:
        _note(found.path, directory, kind)
    return made


def _stage_of(checkpoint: Path) -> str:
    file = checkpoint.parent.parent / "config.yaml"
    return read_config([file], []).trainer.stage if file.is_file() else "rl"


def _written(directory: Path, fill: Callable[[Path], ExportedModel]) -> ExportedModel:
    unfinished = temporary_path(directory)
    try:
        with writing(directory, field="DIR", fix=_FIX_OUTPUT), in_progress(unfinished):
            directory.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned_writes(directory)
            unfinished.mkdir()
            with no_progress_bars():
                made = fill(unfinished)
            if directory.exists():
                directory.rmdir()
            unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return made


def _scorer(checkpoint: Path, folder: Path, merge: bool | None) -> ExportedModel:
    config = read_config([checkpoint.parent.parent / "config.yaml"], [])
    model = config.actor_rollout_ref.model
    if merge and model.lora_rank == 0:
        raise UserError("--merge", True, "the reward model has no adapter", "drop --merge")
    write_reward_model(config, checkpoint, folder)
    export_tokenizer(model.tokenizer_path or model.path, folder)
    what = "a reward model, the adapter merged" if model.lora_rank else "a reward model"
    return ExportedModel(source=str(checkpoint), what=what)


def _policy(path: str, folder: Path, merge: bool | None, is_trusted: bool) -> ExportedModel:
    opened = open_checkpoint(path, keep_dtype=True, is_trusted=is_trusted)
    model, stop_ids = opened.config.actor_rollout_ref.model, opened.tokenizer.stop_ids
    has_adapter = bool(adapter_layers(opened.policy.model))
    if merge and not has_adapter:
        why, fix = "the checkpoint has no adapter to merge", "drop --merge"
        raise UserError("--merge", True, why, fix)
    if has_adapter and merge is not False:
        export_merged(opened.policy, model.path, folder, stop_ids=stop_ids)
        what = "a whole model, the adapter merged"
    elif has_adapter:
        export_adapter(opened.policy, model.path, folder)
        what = f"an adapter for {model.path}"
    else:
        export_model(opened.policy, folder, stop_ids=stop_ids)
        what = "a whole model"
    export_tokenizer(model.tokenizer_path or model.path, folder)
    return ExportedModel(source=opened.name, what=what)


def _note(checkpoint: Path, directory: Path, kind: Kind) -> None:
    """Note the export in its run; only warns where the run is not writable."""
    try:
        note_export(checkpoint, directory, kind)
    except UserError as error:
        said = f"the export is whole, but its run could not note it: {error}"
        warnings.warn(said, DamagedRecord, stacklevel=3)
