"""A policy from a directory, a hub id or the package itself, and the threads it is worth."""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from luyen.base.boundary import library_faults
from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models.hf_loading import (
    config_of,
    inspect_folder,
    load_net,
    refuse_gaps,
    refuse_odd_numbers,
)
from luyen.models.lora import add_adapter
from luyen.models.offload import tile_feed_forward
from luyen.models.policy import Policy
from luyen.models.quantization import quantize

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FIELD = "actor_rollout_ref.model.path"
_LOG = logging.getLogger(__name__)
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def model_directory(path: str) -> str:
    """What transformers can load: `builtin://NAME` is a folder of the package."""
    if path.startswith("builtin://"):
        return str(resources.files("luyen") / "builtin" / path.removeprefix("builtin://"))
    return str(Path(path).expanduser()) if path.startswith("~") else path


def dtype_of(model: ModelConfig, device: str) -> torch.dtype:
    """The type weights are computed in."""
    if model.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return _DTYPES[model.dtype]


def load_policy(
    model: ModelConfig,
    *,
    path: str | None = None,
    device: str,
    vocabulary: int,
    seed: int = 0,
    may_be_plain: bool = False,
    on_host: bool = False,
    field: str = _FIELD,
) -> Policy:
    """The policy of a run; `path` loads other weights of the same kind (reference, critic).

    `field` is the key that named them; `vocabulary` is the number of ids the tokenizer knows.
    `seed` decides the fresh weights of `init: random` and of an adapter, and nothing else.
    With `may_be_plain` an architecture that cannot be packed is run by transformers itself. With
    `on_host` weights wait in host memory for a rank to move its part to `device`; those that are
    quantized do not.
    """
    place, on_host = torch.device(device), on_host and model.quantization == "none"
    is_fresh = model.init == "random"
    source = inspect_folder(model, path or model.path, field=field, has_weights=not is_fresh)

    def made(*, is_packed: bool) -> Policy:
        net = _load(model, source, dtype_of(model, device), seed, field)
        _refuse_ids_without_rows(net, vocabulary, source, field)
        has_adapter = model.lora_rank > 0 and path is None
        if has_adapter and model.quantization != "none":
            refuse_odd_numbers(net, source, field=field)
            quantize(net, model, place)
        torch.nn.Module.to(net, "cpu" if on_host else place)
        detach_from_file(net)
        refuse_odd_numbers(net, source, field=field)
        if has_adapter:
            add_adapter(net, model, seed=seed)
        return Policy(
            net, vocabulary=vocabulary, is_packed=is_packed, device=place if on_host else None
        )

    policy = _packed_or_plain(made) if may_be_plain else made(is_packed=True)
    save_memory(policy.model, model)
    if model.use_fused_kernels:
        policy.head = replace(policy.head, is_fused=True)
    policy.is_offloading = model.enable_activation_offload
    return policy.eval()


def _packed_or_plain(made: Callable[..., Policy]) -> Policy:
    """The policy over packed sequences, or as transformers runs it, where it cannot be packed."""
    try:
        return made(is_packed=True)
    except UserError as refusal:
        if refusal.field != _FIELD:
            raise
        # A second copy: the first one was given other layers before its fault showed.
        policy = made(is_packed=False)
        why = f"{refusal.value}: {refusal.why}"
        _LOG.warning("%s; transformers itself runs it, padded and slower", why)
        return policy


@torch.no_grad()
def detach_from_file(net: PreTrainedModel) -> None:
    """Copy weights on the CPU into memory of their own.

    The loader maps them from the file if their dtype is the file's: a later write to the file would
    change the policy of a run, and truncating it would kill the run.
    """
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def save_memory(net: PreTrainedModel, model: ModelConfig) -> None:
    """Have the layers keep less between their forward and backward pass, as the model asks."""
    tiled_mlp = model.tiled_mlp
    if model.enable_gradient_checkpointing and not net.supports_gradient_checkpointing:
        _LOG.warning("%s cannot compute activations again: all are kept", type(net).__name__)
    elif model.enable_gradient_checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    if tiled_mlp.enabled:
        tile_feed_forward(net, slices=tiled_mlp.num_shards)


def _load(
    model: ModelConfig, source: str, dtype: torch.dtype, seed: int, field: str
) -> PreTrainedModel:
    config = read_config(model, source, field=field)
    loader: Any = AutoModelForCausalLM
    if model.init == "random":
        fix = "correct config.json, or model.override_config"
        with (
            library_faults("cannot be made", field=field, path=source, fix=fix),
            torch.random.fork_rng(devices=[]),
        ):
            torch.manual_seed(seed)
            return loader.from_config(config, dtype=dtype)
    net, found = load_net(loader, model, source, config, dtype=dtype, field=field)
    is_cut = "num_hidden_layers" in model.override_config
    refuse_gaps(net, found, source, field=field, is_cut=is_cut)
    return net


def read_config(model: ModelConfig, source: str, *, field: str = _FIELD) -> Any:
    """The model's configuration with what the run overrides, and without randomness."""
    config, unknown = config_of(
        source,
        field=field,
        trust_remote_code=model.trust_remote_code,
        return_unused_kwargs=True,
        **model.override_config,
    )
    odd = sorted(model.override_config.keys() & unknown.keys())
    if odd:
        why = f"the configuration of a {config.model_type} model has no such value"
        override = "actor_rollout_ref.model.override_config"
        raise UserError(override, odd, why, "remove it, or correct the name")
    _refuse_batch_dependence(config, source, field)
    _switch_dropout_off(config)
    return config


def _refuse_ids_without_rows(net: PreTrainedModel, ids: int, source: str, field: str) -> None:
    """A tokenizer that makes larger ids than the embedding has rows is another model's."""
    embedding: Any = net.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if ids > rows:
        why = f"its embedding has {rows} rows, and the tokenizer knows {ids} ids"
        raise UserError(field, source, why, "give the tokenizer of this model")


def _refuse_batch_dependence(config: Any, path: str, field: str) -> None:
    """Rotary embeddings that depend on the longest sequence of a batch break exactness."""
    given: dict[str, Any] = config.get_text_config().to_dict()
    rope: dict[str, Any] = given.get("rope_parameters") or given.get("rope_scaling") or {}
    # Some architectures have one embedding for each kind of layer.
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type") or part.get("type")
        if kind in _BATCH_DEPENDENT_ROPE:
            raise UserError(
                field,
                path,
                f"its rotary embedding `{kind}` changes with the longest sequence of a batch",
                "set override_config.rope_parameters to a fixed kind such as yarn or linear",
            )


def _switch_dropout_off(config: Any) -> None:
    """No dropout and no noise: the sampler and the trainer would disagree."""
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if ("drop" in name or "jitter" in name) and is_number and value:
            setattr(text, name, 0.0)


# The number of threads for a model.

_SMALL = 10_000_000


def choose_threads(model: nn.Module) -> None:
    """One thread for a tiny model: waiting for a second costs more than it computes."""
    if sum(p.numel() for p in model.parameters()) < _SMALL:
        torch.set_num_threads(1)
