"""A policy from a directory, a hub id or the package itself."""

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from luyen.base.errors import UserError
from luyen.config.schema.model import Model
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy
from luyen.models.silence import no_progress_bars, no_warnings
from luyen.models.tiled import tile_feed_forward

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def model_directory(path: str) -> str:
    """What transformers can load: `builtin://NAME` is a folder of the package."""
    if path.startswith("builtin://"):
        return str(resources.files("luyen") / "builtin" / path.removeprefix("builtin://"))
    return str(Path(path).expanduser()) if path.startswith("~") else path


def dtype_of(model: Model, device: str) -> torch.dtype:
    """The type weights are computed in."""
    if model.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return _DTYPES[model.dtype]


def load_policy(
    model: Model,
    *,
    path: str | None = None,
    device: str,
    vocabulary: int,
    seed: int = 0,
    is_packed: bool = True,
) -> Policy:
    """The policy of a run; `path` loads other weights of the same kind (reference, critic).

    `seed` decides the fresh weights of `init: random` and of an adapter, and nothing else.
    `is_packed` False is for an architecture that only the `hf` engine can serve.
    """
    source = model_directory(path or model.path)
    net = _load(model, source, dtype_of(model, device), seed)
    torch.nn.Module.to(net, torch.device(device))
    leave_the_file(net)
    if model.lora_rank > 0 and path is None:
        add_adapter(net, model, seed=seed)
    policy = Policy(net, vocabulary=vocabulary, is_packed=is_packed)
    save_memory(policy.model, model)
    if model.use_fused_kernels:
        policy.head = replace(policy.head, is_fused=True)
    policy.is_offloading = model.enable_activation_offload
    return policy.eval()


@torch.no_grad()
def leave_the_file(net: PreTrainedModel) -> None:
    """Copy weights on the CPU into memory of their own.

    The loader maps them from the file where their type is the file's: whoever writes to the file
    would change the policy of a run, and whoever shortens it would kill the run.
    """
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def save_memory(net: PreTrainedModel, model: Model) -> None:
    """Have the layers keep less between their forward and backward pass, as the model asks."""
    tiled_mlp = model.tiled_mlp
    if model.enable_gradient_checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    if tiled_mlp.enabled:
        tile_feed_forward(net, slices=tiled_mlp.num_shards)


def _load(model: Model, source: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    try:
        config = read_config(model, source)
        loader: Any = AutoModelForCausalLM
        if model.init == "random":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return loader.from_config(config, dtype=dtype)
        with no_progress_bars(), no_warnings():
            net, found = loader.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            "actor_rollout_ref.model.path",
            source,
            f"cannot be loaded: {str(error).splitlines()[0].rstrip('.')}",
            "give a directory with config.json and weights, or a hub id that is reachable",
        ) from error
    _refuse_gaps(found, source)
    return net


def read_config(model: Model, source: str) -> Any:
    """The model's configuration with what the run overrides, and without randomness."""
    loader: Any = AutoConfig
    config, unknown = loader.from_pretrained(
        source,
        trust_remote_code=model.trust_remote_code,
        return_unused_kwargs=True,
        **model.override_config,
    )
    odd = sorted(model.override_config.keys() & unknown.keys())
    if odd:
        why = f"the configuration of a {config.model_type} model has no such value"
        field = "actor_rollout_ref.model.override_config"
        raise UserError(field, odd, why, "remove it, or mend the name")
    _refuse_batch_dependence(config, model.path)
    _switch_dropout_off(config)
    return config


def _refuse_gaps(found: dict[str, Any], source: str) -> None:
    """Weights that the files lack would be random, in silence."""
    lacking = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if lacking:
        raise UserError(
            "actor_rollout_ref.model.path",
            source,
            f"{len(lacking)} weights are not in its files or have another shape: {lacking[:3]}",
            "give a directory that holds the whole model its config.json describes",
        )


def _refuse_batch_dependence(config: Any, path: str) -> None:
    """Rotary embeddings that depend on the longest sequence of a batch break exactness."""
    given: dict[str, Any] = config.get_text_config().to_dict()
    rope: dict[str, Any] = given.get("rope_parameters") or given.get("rope_scaling") or {}
    # Some architectures have one embedding for each kind of layer.
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type") or part.get("type")
        if kind in _BATCH_DEPENDENT_ROPE:
            raise UserError(
                "actor_rollout_ref.model.path",
                path,
                f"its rotary embedding `{kind}` changes with the longest sequence of a batch",
                "set override_config.rope_parameters to a fixed kind such as yarn or linear",
            )


def _switch_dropout_off(config: Any) -> None:
    """No dropout and no noise: the sampler and the trainer would disagree."""
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value:
            setattr(text, name, 0.0)
