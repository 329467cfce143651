"""LoRA through peft: adapters inside the model, which keeps its own class."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from luyen.base.boundary import library_faults
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.seeds import derive_key
from luyen.config.model_folder.check import (
    ADAPTER_WEIGHTS,
    adapter_faults,
    read_adapter_config,
    refuse,
    sound,
    trained_settings,
)
from luyen.config.schema.model import ModelConfig
from luyen.models.adapter_dropout import AdapterDropout
from luyen.models.weights import is_adapter_layer

_PREFIX = "base_model.model."
"""What peft puts before the names it saves."""
_FIELD = "actor_rollout_ref.model.lora_adapter_path"
ADAPTER = "default"
"""peft's name of the one adapter that a model has here."""
_INITS: dict[str, Any] = {"kaiming": True, "gaussian": "gaussian"}
"""`model.lora_init` -> peft's `init_lora_weights`."""
Shapes = dict[str, tuple[int, ...]]


@functools.cache
def _peft() -> Any:
    """peft, imported with the first adapter: it takes seconds, and bitsandbytes comes with it."""
    import peft

    return peft


def add_adapter(
    net: PreTrainedModel, model: ModelConfig, *, seed: int = 0, task: str = "CAUSAL_LM"
) -> None:
    """Freeze the weights and add an adapter of `model.lora_rank`, fresh or from a directory.

    `task` is peft's name of what the model is for: `SEQ_CLS` leaves out the head of a classifier.
    """
    directory = None if model.lora_adapter_path is None else expanded(model.lora_adapter_path)
    if directory is not None:
        refuse(adapter_faults(directory, rank=model.lora_rank), field=_FIELD, path=str(directory))
        _refuse_another_scale(directory, model)
    names = list(model.target_modules)
    config = _peft().LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=_targets(net, names),
        lora_dropout=model.lora_dropout,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
        init_lora_weights=_INITS[model.lora_init],
        task_type=task,
    )
    net.requires_grad_(False)
    field, fix = "actor_rollout_ref.model.target_modules", "name linear layers of the model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_key(seed, "adapter"))
        with library_faults("no adapter can be put there", field=field, path=str(names), fix=fix):
            _peft().inject_adapter_in_model(config, net)
    if model.lora_dropout > 0:
        for place, layer in enumerate(adapter_layers(net).values()):
            # peft's own masks come from global random numbers.
            layer.lora_dropout[ADAPTER] = AdapterDropout(model.lora_dropout, place=place).eval()
    if directory is not None:
        load_adapter(net, directory)


def _targets(net: PreTrainedModel, names: Sequence[str]) -> str | list[str]:
    """What peft puts adapters on: linear layers of these names.

    In a mixture peft would also take its stacked experts and its routers, which are none.
    """
    is_any = list(names) == ["all-linear"]
    if all(parameter.dim() < _STACKED for parameter in net.parameters()):
        return "all-linear" if is_any else list(names)
    head = net.get_output_embeddings()
    layers = {n: m for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    if is_any:
        return [n for n, m in layers.items() if isinstance(m, nn.Linear) and m is not head]
    return [n for n in layers if any(f".{n}".endswith(f".{name}") for name in names)]


_STACKED = 3
"""Dimensions of the weights of all experts of a layer in one tensor."""


def load_adapter(net: PreTrainedModel, directory: Path) -> None:
    """Read adapter weights; a UserError when they do not fit the model."""
    fix = "fetch the adapter again"
    with library_faults("cannot be loaded", field=_FIELD, path=str(directory), fix=fix):
        tensors = load_file(directory / ADAPTER_WEIGHTS)
    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    own = {name: tuple(tensor.shape) for name, tensor in adapter_state(net).items()}
    given = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    odd = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if odd:
        raise UserError(_FIELD, str(directory), _misfit(odd, own, given, directory), _FIT)
    wild = [name for name, tensor in saved.items() if not bool(tensor.isfinite().all())]
    if wild:
        why = f"weight {wild[0]} holds numbers that are NaN or infinite"
        raise UserError(_FIELD, str(directory), why, "take another copy of the adapter")
    _peft().set_peft_model_state_dict(net, saved)


_FIT = "set lora_rank and target_modules as they were when it was trained, over the same model"


def _misfit(odd: list[str], own: Shapes, given: Shapes, directory: Path) -> str:
    """How the first weight that differs does, and which model the adapter names."""
    name = odd[0]
    here = f"{list(own[name])}" if name in own else "not there"
    there = f"{list(given[name])}" if name in given else "not there"
    config = read_adapter_config(directory) or {}
    base = config.get("base_model_name_or_path")
    over = f"; it was made for {base}" if base else ""
    return (
        f"{len(odd)} of its weights do not fit the adapter of this run, e.g. {name}: "
        f"{there} in the file, {here} in the run{over}"
    )


def _refuse_another_scale(directory: Path, model: ModelConfig) -> None:
    """The weights say nothing of their scale: with another one they would be another policy."""
    config = sound(lambda: read_adapter_config(directory), field=_FIELD, path=str(directory))
    for name, trained in trained_settings(config or {}).items():
        value = getattr(model, name)
        if trained != value:
            raise UserError(
                f"actor_rollout_ref.model.{name}",
                value,
                f"the adapter in {directory} was trained with {trained}",
                f"set it to {trained}",
            )


def adapter_state(net: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's own weights."""
    return _peft().get_peft_model_state_dict(net)


def adapter_rank(net: PreTrainedModel) -> int:
    """Rank of the adapter; 0: there is none."""
    layers = adapter_layers(net).values()
    return next((int(rank) for layer in layers for rank in layer.r.values()), 0)


def adapter_layers(net: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by name; empty without one."""
    return {name: layer for name, layer in net.named_modules() if is_adapter_layer(layer)}


def merged_weight(layer: Any, below: Tensor) -> Tensor:
    """The weight `below` with the adapter of its layer, in fp32 and as peft merges them."""
    weight = below.float() + layer.get_delta_weight(ADAPTER).float().to(below.device)
    if ADAPTER not in layer.lora_magnitude_vector:
        return weight
    # DoRA: the norms of rows, one for each output, are learned.
    magnitude = layer.lora_magnitude_vector[ADAPTER].weight.float().to(below.device)
    rows = weight.T if layer.fan_in_fan_out else weight
    scaled = rows * (magnitude / torch.linalg.norm(rows, dim=1))[:, None]
    return scaled.T if layer.fan_in_fan_out else scaled


@contextmanager
def adapter_off(net: nn.Module) -> Iterator[None]:
    """The model without its adapter: the reference policy of a LoRA run."""
    layers = adapter_layers(net).values()
    assert layers, "the model has no adapter to switch off"
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
