"""Whether the files of a LoRA adapter can be read, by their headers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luyen.config.model_folder.files import UnsoundFile, all_faults, read_object, shown, size_of
from luyen.config.model_folder.header import read_header
from luyen.config.model_folder.weights import FLOATS

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OTHER = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "lora_bias",
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
)
"""Settings under which the same weights are added in another way, or to other layers."""
_MEND = "set lora_rank and target_modules as they were when it was trained"


def adapter_faults(folder: Path, *, rank: int) -> list[UnsoundFile]:
    """What is wrong with an adapter for a run of this rank."""

    def found() -> Iterator[UnsoundFile]:
        config = read_adapter_config(folder)
        if config is not None and config.get("r", rank) != rank:
            why = f"r is {shown(config['r'])}, and the run has lora_rank {rank}"
            yield UnsoundFile(CONFIG, why, _MEND)
            return
        if size_of(folder, WEIGHTS) is None:
            raise UnsoundFile(WEIGHTS, "it is not there", "mend the path")
        for name, facts in read_header(folder, WEIGHTS).items():
            if facts.dtype not in FLOATS:
                why = f"{name} holds {facts.dtype}, which is no type of weights"
                yield UnsoundFile(WEIGHTS, why, "fetch the adapter again")
            elif ".lora_A." in name and facts.shape[:1] != (rank,):
                why = f"{name} is {list(facts.shape)}, and the run has lora_rank {rank}"
                yield UnsoundFile(WEIGHTS, why, _MEND)
                return

    return all_faults(found())


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """What `adapter_config.json` says; None where there is none, UnsoundFile for nonsense."""
    config = read_object(folder, CONFIG)
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
            raise UnsoundFile(CONFIG, f"{name} is {shown(value)}", "fetch the adapter again")
    _refuse_other_kinds(config)
    return config


def _refuse_other_kinds(config: dict[str, Any]) -> None:
    """The files look alike, and the numbers that a model makes of them would not be theirs."""
    other = {name: config[name] for name in _OTHER if config.get(name)}
    if config.get("peft_type") not in (None, "LORA"):
        other["peft_type"] = config["peft_type"]
    for name, value in other.items():
        why = f"{name} is {shown(value)}, and only plain LoRA is computed here"
        raise UnsoundFile(CONFIG, why, "merge it into its model with peft, and name that model")


def demand_adapter_config(folder: Path) -> dict[str, Any]:
    """The same where every value is needed."""
    config = read_adapter_config(folder) or {}
    for name in ("r", "lora_alpha", "base_model_name_or_path", "target_modules"):
        if config.get(name) is None:
            raise UnsoundFile(CONFIG, f"it does not say {name}", "fetch the adapter again")
    return config
