"""The reward model of a checkpoint, as transformers reads it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luyen.checkpoint.tensors import load_state
from luyen.config.schema.run import RunConfig
from luyen.data.tokenizer import Tokenizer
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
    model.save(
        folder,
        pad_token=pad_token(load_run_tokenizer(config), written.get_text_config().pad_token_id),
        is_stepwise=config.reward_training.objective == "process",
    )


def pad_token(tokenizer: Tokenizer, of_model: int | None) -> int | None:
    """The tokenizer's padding token, else the model's; None where it may end what is judged.

    transformers would then look at the token before the end, and give another score.
    """
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else of_model
    end = tokenizer.turn_end
    closing = tokenizer.encode(end.text + end.trailing) if end is not None else []
    last = {closing[-1]} if closing else {*tokenizer.stop_ids, tokenizer.unknown_id}
    return None if pad in last else pad
