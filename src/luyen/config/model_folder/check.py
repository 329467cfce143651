"""All faults of a model's or LoRA adapter's files, for `check` and for loading."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from luyen.base.errors import UserError
from luyen.config.model_folder.config_json import (
    read_config,
    size_faults,
    text_config,
    unknown_names,
)
from luyen.config.model_folder.files import (
    InvalidFile,
    all_faults,
    read_object,
    short_repr,
    size_of,
)
from luyen.config.model_folder.tokenizer import end_ids, tokenizer_faults, tokenizer_remarks
from luyen.config.model_folder.weights import FLOATS, read_header, read_tensors, tensor_faults

T = TypeVar("T")
_LAYERS = "num_hidden_layers"


def model_faults(
    folder: Path, *, override: Mapping[str, Any], has_weights: bool = True, has_head: bool = True
) -> list[InvalidFile]:
    """What is wrong with config and weights; without `has_weights` they are random."""

    def found() -> Iterator[InvalidFile]:
        raw = read_config(folder)
        config = text_config(raw, override)
        wrong = [*unknown_names(raw, override), *size_faults(config)]
        yield from wrong
        if size_of(folder, "adapter_config.json") is not None:
            why = "the folder also holds an adapter, which would be applied to the model silently"
            fix = "give it a folder of its own, and name that in model.lora_adapter_path"
            yield InvalidFile("adapter_config.json", why, fix)
        if has_weights and not wrong:
            tensors = read_tensors(folder)
            if tensors is not None:
                is_cut = _LAYERS in override
                yield from tensor_faults(tensors, config, has_head=has_head, is_cut=is_cut)
        end_ids(folder, _rows(config))

    return all_faults(found())


def tokenizer_folder_faults(
    folder: Path, *, model: Path | None, override: Mapping[str, Any] | None = None
) -> list[InvalidFile]:
    """What is wrong with a tokenizer's files; `model` is the folder with the sizes, if known.

    `override` replaces values of the model's config.
    """

    def found() -> Iterator[InvalidFile]:
        if size_of(folder, "config.json") is not None:
            # The tokenizer class may also depend on the model's config.
            yield from size_faults(text_config(read_config(folder), {}))
        yield from tokenizer_faults(folder, _rows_of(model, override or {}))

    return all_faults(found())


def folder_remarks(folder: Path) -> list[str]:
    """What a user should know of the folder's chat template; nothing where it cannot be used."""
    try:
        return tokenizer_remarks(folder)
    except InvalidFile:
        return []


def refuse(faults: Iterable[InvalidFile], *, field: str, path: str) -> None:
    """A UserError for the first fault, in the words of `check`."""
    for fault in faults:
        raise UserError(field, path, fault.words, fault.fix)


def sound(read: Callable[[], T], *, field: str, path: str) -> T:
    """What `read` returns; an unsound file becomes a UserError."""
    try:
        return read()
    except InvalidFile as fault:
        raise UserError(field, path, fault.words, fault.fix) from fault


def _rows_of(model: Path | None, override: Mapping[str, Any]) -> int | None:
    try:
        return None if model is None else _rows(text_config(read_config(model), override))
    except InvalidFile:
        return None  # said where the model is looked at


def _rows(config: Mapping[str, Any]) -> int | None:
    value = config.get("vocab_size")
    return value if type(value) is int and value > 0 else None


# Whether the files of a LoRA adapter can be read, by their headers.

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OTHER = (
    "use_qalora",
    "lora_bias",
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
)
"""Settings under which the same weights are added in another way, or to other layers."""
_FIX_ADAPTER = "set lora_rank and target_modules as they were when it was trained"


def adapter_faults(folder: Path, *, rank: int) -> list[InvalidFile]:
    """What is wrong with an adapter for a run of this rank."""

    def found() -> Iterator[InvalidFile]:
        config = read_adapter_config(folder)
        if config is not None and config.get("r", rank) != rank:
            why = f"r is {short_repr(config['r'])}, and the run has lora_rank {rank}"
            yield InvalidFile(ADAPTER_CONFIG, why, _FIX_ADAPTER)
            return
        if size_of(folder, ADAPTER_WEIGHTS) is None:
            raise InvalidFile(ADAPTER_WEIGHTS, "it is not there", "correct the path")
        for name, facts in read_header(folder, ADAPTER_WEIGHTS).items():
            if facts.dtype not in FLOATS:
                why = f"{name} holds {facts.dtype}, which is no type of weights"
                yield InvalidFile(ADAPTER_WEIGHTS, why, "fetch the adapter again")
            elif ".lora_A." in name and facts.shape[:1] != (rank,):
                why = f"{name} is {list(facts.shape)}, and the run has lora_rank {rank}"
                yield InvalidFile(ADAPTER_WEIGHTS, why, _FIX_ADAPTER)
                return

    return all_faults(found())


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """What `adapter_config.json` says; None where there is none, InvalidFile for nonsense."""
    config = read_object(folder, ADAPTER_CONFIG)
    if config is None:
        return None
    kinds: dict[str, tuple[type, ...]] = {
        "r": (int,),
        "lora_alpha": (int, float),
        "base_model_name_or_path": (str, type(None)),
        "target_modules": (str, list),
    }
    for name, allowed in kinds.items():
        value = config.get(name)
        if name in config and (not isinstance(value, allowed) or isinstance(value, bool)):
            raise InvalidFile(
                ADAPTER_CONFIG, f"{name} is {short_repr(value)}", "fetch the adapter again"
            )
    _refuse_other_kinds(config)
    return config


def _refuse_other_kinds(config: dict[str, Any]) -> None:
    """The files look alike, and the numbers that a model makes of them would not be theirs."""
    other = {name: config[name] for name in _OTHER if config.get(name)}
    if config.get("peft_type") not in (None, "LORA"):
        other["peft_type"] = config["peft_type"]
    for name, value in other.items():
        why = f"{name} is {short_repr(value)}, which is not computed here"
        raise InvalidFile(
            ADAPTER_CONFIG, why, "merge it into its model with peft, and name that model"
        )


def trained_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `actor_rollout_ref.model` that must be as they were when an adapter was trained.

    Example:
        >>> trained_settings({"lora_alpha": 8, "r": 4})
        {'lora_alpha': 8, 'use_rslora': False, 'use_dora': False}
    """
    if not config:
        return {}  # a folder of weights alone
    alpha = {"lora_alpha": config["lora_alpha"]} if "lora_alpha" in config else {}
    return {**alpha, **{n: bool(config.get(n)) for n in ("use_rslora", "use_dora")}}


def demand_adapter_config(folder: Path) -> dict[str, Any]:
    """The same where every value is needed."""
    config = read_adapter_config(folder) or {}
    for name in ("r", "lora_alpha", "base_model_name_or_path", "target_modules"):
        if config.get(name) is None:
            raise InvalidFile(ADAPTER_CONFIG, f"it does not say {name}", "fetch the adapter again")
    return config
