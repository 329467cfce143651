"""LoRA through peft: adapters inside the model, which keeps its own class."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from luyen.base.errors import UserError
from luyen.base.seeds import derive_key
from luyen.config.schema.model import Model

_PREFIX = "base_model.model."
"""What peft puts before the names it saves."""


def add_adapter(net: PreTrainedModel, model: Model, *, seed: int = 0) -> None:
    """Freeze the weights and add an adapter of `model.lora_rank`, fresh or from a directory.

    Dropout is 0: a random mask would make the sampler and the trainer disagree.
    """
    names = list(model.target_modules)
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,  # pyright: ignore[reportArgumentType] - a float is fine
        target_modules="all-linear" if names == ["all-linear"] else names,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    net.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_key(seed, "adapter"))
        inject_adapter_in_model(config, net)
    if model.lora_adapter_path is not None:
        directory = Path(model.lora_adapter_path).expanduser()
        _refuse_another_scale(directory, model)
        load_adapter(net, directory)


def load_adapter(net: PreTrainedModel, directory: Path) -> None:
    """Read adapter weights; a UserError when they do not fit the model."""
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        field = "actor_rollout_ref.model.lora_adapter_path"
        raise UserError(field, str(directory), f"there is no {file.name} in it", "mend the path")
    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(file).items()}
    own = {name: tuple(tensor.shape) for name, tensor in adapter_state(net).items()}
    given = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    odd = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if odd:
        raise UserError(
            "actor_rollout_ref.model.lora_adapter_path",
            str(directory),
            f"{len(odd)} of its weights do not fit the adapter of this run, e.g. {odd[0]}",
            "set lora_rank and target_modules as they were when it was trained",
        )
    set_peft_model_state_dict(net, saved)


def _refuse_another_scale(directory: Path, model: Model) -> None:
    """The weights say nothing of alpha: with another one the adapter would be another policy."""
    file = directory / "adapter_config.json"
    if not file.is_file():
        return
    alpha = json.loads(file.read_text()).get("lora_alpha", model.lora_alpha)
    if alpha != model.lora_alpha:
        raise UserError(
            "actor_rollout_ref.model.lora_alpha",
            model.lora_alpha,
            f"the adapter in {directory} was trained with {alpha}",
            f"set it to {alpha}",
        )


def adapter_state(net: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's own weights."""
    return get_peft_model_state_dict(net)


@contextmanager
def adapter_off(net: nn.Module) -> Iterator[None]:
    """The model without its adapter: the reference policy of a LoRA run."""
    layers = [m for m in net.modules() if isinstance(m, BaseTunerLayer)]
    assert layers, "the model has no adapter to switch off"
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
