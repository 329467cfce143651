"""What a role keeps in a checkpoint, written and read by any number of ranks."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from luyen.base.files import read_json
from luyen.checkpoint.tensors import load_state
from luyen.engine.optim import MasterAdamW
from luyen.engine.shown import shown_parameters
from luyen.models.state import restore_parameters


def role_state(name: str, module: nn.Module, optimizer: MasterAdamW) -> dict[str, Any]:
    """Parts of a checkpoint by name, for `luyen.checkpoint.tensors.save_state` on every rank.

    They have the same names, types and shapes for shards as for a model on one device.
    """
    return {name: shown_parameters(module), _optimizer(name): optimizer.state_dict()}


def role_weights(name: str, module: nn.Module, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Of the same, what learns and its masters, by part and name."""
    masters = enumerate(optimizer.masters_beside())
    return {
        **{f"{name}/{own}": tensor for own, tensor in shown_parameters(module).items()},
        **{f"{_optimizer(name)}/masters/{i}": master for i, master in masters},
    }


def load_role(folder: Path, name: str, module: nn.Module, optimizer: MasterAdamW) -> None:
    """Go on from a checkpoint, whoever saved it. All ranks call it, and each reads its shards."""
    restore_parameters(module, load_state(folder, name, into=shown_parameters(module)))
    part = _optimizer(name)
    into = optimizer.state_dict() if optimizer.is_sharded else None
    if into is not None and not read_json(folder / f"{part}.json")["state"]["adamw"]["state"]:
        into["adamw"]["state"] = {}  # saved before the first step
    optimizer.load_state_dict(load_state(folder, part, into=into))


def _optimizer(name: str) -> str:
    return f"{name}_optimizer"
