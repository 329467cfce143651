"""The reward model of a checkpoint, as transformers reads it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luyen.checkpoint.tensors import load_state
from luyen.config.schema.run import RunConfig
from luyen.models.reward_model_load import load_reward_model
from luyen.models.state import restore_parameters
from luyen.train.process import load_run_tokenizer

_FIELD = "actor_rollout_ref.model.path"


def fill_scorer(config: RunConfig, checkpoint: Path, folder: Path) -> None:
    """Write weights, head included, and config; weights keep the type they were saved in."""
    weights: dict[str, Tensor] = load_state(checkpoint, "actor")
    is_half = any(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    form = {"dtype": "bfloat16" if is_half else "float32", "enable_gradient_checkpointing": False}
    block = config.actor_rollout_ref.model.model_copy(update=form)
    model = load_reward_model(block, device="cpu", field=_FIELD, new_head=config.trainer.seed)
    restore_parameters(model, weights)
    written: Any = model.net.config
    pad: int | None = written.get_text_config().pad_token_id
    # A token that ends turns would be taken for padding at the end of every answer.
    stops = load_run_tokenizer(config).stop_ids
    model.save(
        folder,
        pad_token=None if pad in stops else pad,
        is_stepwise=config.reward_training.objective == "process",
    )
