"""Loading a network from untrusted files: nothing is dropped, made up or misread in silence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from luyen.base.boundary import library_faults
from luyen.base.errors import UserError, did_you_mean
from luyen.config.model_folder.check import model_faults, refuse, sound
from luyen.config.model_folder.files import InvalidFile, locate
from luyen.config.model_folder.weights import (
    TensorFacts,
    extra_weights,
    is_harmless,
    is_predicting_ahead,
    missing_weights,
    other_shapes,
    pickle_files,
    tensor_faults,
)
from luyen.config.schema.model import ModelConfig

# Silencing transformers where it reports what we check ourselves.


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable the progress bars that transformers shows while it loads weights."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextmanager
def no_warnings() -> Iterator[None]:
    """Without the warnings of transformers; errors are still shown."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


_GIVE = "give a directory with config.json and weights, or a hub id that is reachable"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def inspect_folder(
    model: ModelConfig, path: str, *, field: str, has_weights: bool = True, has_head: bool = True
) -> str:
    """Where transformers loads from, after what the files themselves say was looked at."""
    source = locate(path, field=field)
    if Path(source).is_dir() and not path.startswith("builtin://"):
        faults = model_faults(
            Path(source),
            override=model.override_config,
            has_weights=has_weights,
            has_head=has_head,
        )
        refuse(faults, field=field, path=path)
    return source


def config_of(source: str, *, field: str, **options: Any) -> Any:
    """What AutoConfig makes of a folder or a hub id; `options` are its own."""
    loader: Any = AutoConfig
    with (
        no_warnings(),
        library_faults("cannot be loaded", field=field, path=source, fix=_GIVE),
    ):
        made = loader.from_pretrained(source, **options)
        config = made[0] if isinstance(made, tuple) else made
        config.get_text_config().to_dict()  # some parts are parsed lazily
    _refuse_kernels(config, source, field)
    return made


def _refuse_kernels(config: PreTrainedConfig, source: str, field: str) -> None:
    """A part by a repository's name (`org/name`) would be fetched and run as machine code."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _refuse_kernels(value, source, field)
        elif "_implementation" in name and "/" in str(value):
            key = name.removesuffix("_internal").removeprefix("_")
            why = f"{key} is {value!r}: code of that repository would be fetched and run"
            raise UserError(field, source, why, "remove the key; attention is chosen here")


def load_net(
    loader: Any, model: ModelConfig, source: str, config: Any, *, dtype: torch.dtype, field: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The network with its weights, and what transformers found missing, left over or misshapen."""
    _refuse_unknown_parts(config, source, field)
    if Path(source).is_dir():
        _look_into_pickles(Path(source), config, model, field)
    with (
        no_progress_bars(),
        no_warnings(),
        library_faults("cannot be loaded", field=field, path=source, fix=_GIVE),
    ):
        return loader.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, tensor by tensor
        )


def refuse_gaps(
    net: PreTrainedModel,
    found: Mapping[str, Any],
    source: str,
    *,
    field: str,
    is_cut: bool,
    made: frozenset[str] = frozenset(),
) -> None:
    """A UserError for weights that would be random, dropped or untied in silence.

    `is_cut`: the run itself changes the layers. `made`: weights that are initialised on purpose.
    """
    shapes = sorted(entry for entry in found["mismatched_keys"] if entry[0] not in made)
    lacking = sorted({*found["missing_keys"]} - made)
    config: Any = net.config.get_text_config()
    given: dict[str, Any] = config.to_dict()
    layers, ahead = config.num_hidden_layers, given.get("num_nextn_predict_layers") or 0
    extra = [
        name
        for name in found["unexpected_keys"]
        if not is_harmless(name) and not is_predicting_ahead(name, layers, ahead)
    ]
    faults: list[InvalidFile] = []
    if shapes:
        _, found_shape, wanted = shapes[0]
        faults.append(other_shapes([entry[0] for entry in shapes], "weights", found_shape, wanted))
    if lacking:
        faults.append(missing_weights(lacking))
    if extra and not is_cut:
        faults.append(extra_weights(extra))
    refuse(faults, field=field, path=source)
    _refuse_torn_ties(net, source, field)
    _refuse_integers(net, source, field)


@torch.no_grad()
def refuse_odd_numbers(net: torch.nn.Module, source: str, *, field: str) -> None:
    """A UserError where a weight is NaN or infinite.

    One pass over the weights, where they lie: 0.5 to 2 s for a billion of them on one core. A
    sum is finite only where everything in it is; the other way round it may be too large.
    """
    weights = [*net.named_parameters()]
    if not weights:
        return
    sums = torch.stack([tensor.sum().float() for _, tensor in weights])
    for place in (~sums.isfinite()).nonzero()[:, 0].tolist():
        name, tensor = weights[place]
        nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        if nan + infinite:
            kinds = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
            why = f"weight {name} holds {' and '.join(kinds)} of {tensor.numel()} numbers"
            fix = "fetch the model again; if it was trained here, take an earlier checkpoint"
            raise UserError(field, source, why, fix)


def _refuse_unknown_parts(config: Any, source: str, field: str) -> None:
    """Activations and rotary embeddings are looked up by name, deep inside of a model."""
    given: dict[str, Any] = config.get_text_config().to_dict()
    for key in _ACTIVATIONS:
        name = given.get(key)
        if isinstance(name, str) and name not in ACT2FN:
            fix = did_you_mean(name, [*ACT2FN])
            why = f"config.json: {key} `{name[:60]}` is not known"
            raise UserError(field, source, why, fix)
    rope: dict[str, Any] = given.get("rope_parameters") or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type") or part.get("type") or "default"
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            fix = did_you_mean(str(kind), ["default", *ROPE_INIT_FUNCTIONS])
            why = f"config.json: rope_type `{str(kind)[:60]}` is not known"
            raise UserError(field, source, why, fix)


def _look_into_pickles(folder: Path, config: Any, model: ModelConfig, field: str) -> None:
    """Types and shapes of pickled weights, of which nothing but tensors is ever unpickled."""
    has_own = (folder / "model.safetensors").exists()
    if has_own or (folder / "model.safetensors.index.json").exists():
        return
    tensors: dict[str, TensorFacts] = {}
    fix = "give safetensors; a pickle that holds more than tensors is never run"
    for name in sound(lambda: pickle_files(folder), field=field, path=str(folder)):
        with library_faults(f"{name}: it holds no weights", field=field, path=str(folder), fix=fix):
            found = torch.load(folder / name, map_location="meta", weights_only=True)
            tensors |= {
                key: TensorFacts(
                    file=name, dtype=_TYPES.get(t.dtype, str(t.dtype)), shape=tuple(t.shape)
                )
                for key, t in found.items()
            }
    is_cut = "num_hidden_layers" in model.override_config
    text: dict[str, Any] = config.get_text_config().to_dict()
    faults = tensor_faults(tensors, {**text, "model_type": None}, has_head=False, is_cut=is_cut)
    refuse(faults, field=field, path=str(folder))


def _refuse_torn_ties(net: PreTrainedModel, source: str, field: str) -> None:
    """A head of its own under a config that says tied: transformers keeps both and says nothing."""
    config: Any = net.config.get_text_config()
    output, embedding = net.get_output_embeddings(), net.get_input_embeddings()
    if output is None or not config.tie_word_embeddings:
        return
    if output.weight is not embedding.weight:
        why = "config.json: tie_word_embeddings is true, and the files hold an output layer of "
        why += "other numbers than the embedding"
        raise UserError(field, source, why, "set tie_word_embeddings to false in config.json")


def _refuse_integers(net: PreTrainedModel, source: str, field: str) -> None:
    """Weights that a quantisation left as whole numbers have no gradient."""
    odd = [name for name, weight in net.named_parameters() if not weight.is_floating_point()]
    if odd:
        why = f"{len(odd)} weights are quantised and cannot be trained, e.g. {odd[0]}"
        raise UserError(field, source, why, "give the model in float32, float16 or bfloat16")
