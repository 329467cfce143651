"""Which architectures transformers itself has to run: known by their name, before one is loaded."""

from pathlib import Path
from typing import Any

from luyen.config.model_folder.files import UnsoundFile, read_object
from luyen.config.model_folder.locate import folder_of
from luyen.config.model_folder.sizes import text_config
from luyen.config.schema.model import Model

PLAIN = frozenset(
    {
        *("bamba", "bloom", "codegen", "falcon", "falcon_h1", "falcon_mamba", "jamba"),
        *("mamba", "mpt", "qwen3_next", "rwkv"),
    }
)
"""Types of models whose sequences cannot be packed: they keep a running state, or attend on their
own. Others are found out when they are loaded."""

_LEARNED = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})


def read_raw(model: Model) -> dict[str, Any] | None:
    """What the config of `model.path` says of its decoder; None when none is on this machine.

    The model may be built in, in a directory, or in the hub's cache.
    """
    folder = folder_of(model.path)
    try:
        config = None if folder is None else read_object(folder, "config.json")
    except UnsoundFile:
        return None  # a rule says why
    return None if config is None else text_config(config, model.override_config)


def plain_type(model: Model) -> str | None:
    """The type of a model that only transformers runs; None: it is not known to be one."""
    kind = (read_raw(model) or {}).get("model_type")
    return kind if isinstance(kind, str) and kind in PLAIN else None


def most_positions(model: Model) -> int | None:
    """Tokens of a sequence for which a model has learned positions; None: it can read on."""
    raw = read_raw(model) or {}
    held: Any = raw.get("max_position_embeddings") or raw.get("n_positions")
    return held if raw.get("model_type") in _LEARNED and isinstance(held, int) else None


def brings_code(model: Model) -> bool:
    """Whether the model's folder names code of its own that the run trusts."""
    named: Any = (read_raw(model) or {}).get("auto_map")
    is_model = isinstance(named, dict) and "AutoModelForCausalLM" in named
    return is_model and model.trust_remote_code


def unplanned(model: Model) -> str:
    """Why the memory of a model is not known, as a clause, with what is known."""
    folder = folder_of(model.path)
    if read_raw(model) is None or folder is None:
        return "since no config.json of the model can be read on this machine"
    why = "since its config.json names its sizes otherwise than the decoders that are planned for"
    kind = plain_type(model)
    if kind is not None:
        why = f"since transformers itself runs a {kind} model"
    elif brings_code(model):
        why = "since the model brings its own code"
    held = sum(file.stat().st_size for file in _weights(folder))
    return f"{why}; the files of its weights have {held / 1024**2:.1f} MiB"


def _weights(folder: Path) -> list[Path]:
    return [file for end in ("safetensors", "bin") for file in folder.glob(f"*.{end}")]
