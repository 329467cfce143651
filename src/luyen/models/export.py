"""A policy as a Hugging Face directory, without changing the policy."""

import copy
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from luyen.base.errors import UserError
from luyen.models.load import model_directory
from luyen.models.lora import ADAPTER, adapter_layers, adapter_state, merged_weight
from luyen.models.policy import Policy
from luyen.models.quantization import is_quantized, plain_state, restored

_PREFIX = "base_model.model."
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def export_model(policy: Policy, directory: Path, *, stop_ids: frozenset[int]) -> None:
    """Weights, config and generation config of a model without an adapter."""
    _save(policy.model, directory, stop_ids)


def export_merged(
    policy: Policy, source: str, directory: Path, *, stop_ids: frozenset[int]
) -> None:
    """A whole model whose weights are those of `source` with the adapter's.

    Layers that were quantised have their restored 4-bit weights instead of those of `source`.

    The sum is made in fp32 on a second copy of the model: the live one stays unmerged.
    """
    loader: Any = AutoModelForCausalLM
    dtype = next(policy.parameters()).dtype
    whole: Any = loader.from_pretrained(model_directory(source), dtype=dtype)
    tied = whole.get_output_embeddings() if whole.config.tie_word_embeddings else None
    with torch.no_grad():
        # The adapter learned over 4-bit weights, also in the layers that it is not on.
        for name, layer in policy.model.named_modules():
            if is_quantized(layer):
                below = whole.get_submodule(name.removesuffix(".base_layer"))
                below.weight.copy_(restored(layer))
        for name, layer in adapter_layers(policy.model).items():
            target = whole.get_submodule(name)
            if target is tied:
                why = "the adapter is on the output layer, whose weights are also the embedding's"
                fix = "export the adapter itself (without --merge)"
                raise UserError("--merge", name, why, fix)
            target.weight.copy_(merged_weight(layer, target.weight))
    _save(whole, directory, stop_ids)


def export_adapter(policy: Policy, source: str, directory: Path) -> None:
    """The adapter alone, as peft writes and reads it; `source` is noted as the model below it."""
    save_adapter(directory, adapter_tensors(policy))
    save_adapter_config(policy, source, directory)


def adapter_tensors(policy: Policy) -> dict[str, Tensor]:
    """The adapter's weights under the names of its file: the policy's own tensors."""
    state = adapter_state(policy.model)
    return {f"{_PREFIX}{name.removeprefix(_PREFIX)}": tensor for name, tensor in state.items()}


def save_adapter(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `adapter_tensors` into a directory."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(plain, directory / "adapter_model.safetensors")
    make_readable(directory)


def save_adapter_config(policy: Policy, source: str, directory: Path) -> None:
    """Write rank, scale and layers of the adapter, and `source` as the model below it."""
    net: Any = policy.model
    config: Any = copy.deepcopy(net.peft_config[ADAPTER])
    config.base_model_name_or_path = model_directory(source)
    config.inference_mode = True
    config.save_pretrained(directory)


def export_tokenizer(source: str, directory: Path) -> None:
    """The files of a directory as they are; those of a hub id as transformers writes them."""
    folder = Path(model_directory(source))
    if not folder.is_dir():
        loader: Any = AutoTokenizer
        loader.from_pretrained(source).save_pretrained(directory)
        return
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, directory / name)


@torch.no_grad()
def checkpoint_tensors(policy: Policy, *, merges: bool = True) -> dict[str, Tensor]:
    """Every weight under its name in a checkpoint of Hugging Face's layout.

    `merges` adds an adapter to the weights below it; without it those are as they were loaded.
    Rows beyond the policy's vocabulary are left out, so that a softmax over the rest is that of
    training. Tensors are the policy's own where they need no change; tied ones appear once.
    """
    layers = adapter_layers(policy.model)
    found: dict[str, Tensor] = {}
    places: set[tuple[int, torch.Size]] = set()
    for name, tensor in plain_state(policy.model).items():
        place = (tensor.data_ptr(), tensor.shape)
        if ".lora_" in name or (tensor.numel() and place in places):
            continue
        places.add(place)
        module = name.removesuffix(".base_layer.weight")
        if merges and module in layers:
            tensor = merged_weight(layers[module], tensor).to(tensor.dtype)
        found[name.replace(".base_layer.", ".").removeprefix(_PREFIX)] = tensor
    return _known_rows(policy, revert_weight_conversion(policy.model, found))


def _known_rows(policy: Policy, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those of embedding and output without the rows that no token has."""
    net: Any = policy.model
    rows = net.config.get_text_config().vocab_size
    if policy.head.vocabulary == rows:
        return tensors
    ends = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embed_in.weight")
    return {
        name: tensor[: policy.head.vocabulary]
        if name.endswith(ends) and tensor.shape[0] == rows
        else tensor
        for name, tensor in tensors.items()
    }


def export_for_server(
    policy: Policy, source: str, directory: Path, *, tensors: Mapping[str, Tensor]
) -> None:
    """Config, tokenizer and `checkpoint_tensors` as a directory that an inference server loads."""
    directory.mkdir(parents=True, exist_ok=True)
    config: Any = copy.deepcopy(policy.model.config)
    config.get_text_config().vocab_size = policy.head.vocabulary
    config.save_pretrained(directory)
    export_tokenizer(source, directory)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(plain, directory / "model.safetensors")
    make_readable(directory)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Contiguous tensors of the host as a safetensors file; an OSError if the disk refuses it."""
    with disk_errors():
        save_file(dict(tensors), path, metadata={"format": "pt"})


@contextmanager
def disk_errors() -> Generator[None]:
    """What safetensors says of a disk becomes the OSError that it is."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _save(net: Any, directory: Path, stop_ids: frozenset[int]) -> None:
    with disk_errors():
        net.save_pretrained(directory)
    # What ends a turn here ends it there too: tokenizer, template and model each name some ids.
    generation: GenerationConfig = copy.deepcopy(net.generation_config)
    generation.eos_token_id = sorted(stop_ids)
    generation.save_pretrained(directory)
    make_readable(directory)


def make_readable(directory: Path) -> None:
    """Give weights the permissions of other new files: safetensors writes for the owner alone."""
    for file in directory.glob("*.safetensors"):
        (probe := file.with_name(".mode")).touch()
        file.chmod(probe.stat().st_mode)
        probe.unlink()
