"""Finds the files of a model (built in, folder, hub cache) and reads them defensively."""

import json
import os
import stat
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, cast, final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import expanded, is_directory

_JSON_BYTES = 1 << 27
"""Most bytes of a JSON file; the largest tokenizers have some 30 MB."""


@final
class InvalidFile(Exception):
    """A file of a model that cannot be used, why, and what to do.

    Example:
        >>> InvalidFile("config.json", "it is empty", "fetch the model again").words
        'config.json: it is empty'
    """

    def __init__(self, file: str, why: str, fix: str = "fetch the model again") -> None:
        super().__init__(file, why, fix)
        self.file = file
        self.why = why
        self.fix = fix

    @property
    def words(self) -> str:
        """File and reason, as errors and findings have it."""
        return f"{self.file}: {self.why}"


def all_faults(found: Iterator[InvalidFile]) -> list[InvalidFile]:
    """Faults that are yielded, and the one that ends the search."""
    faults: list[InvalidFile] = []
    try:
        for fault in found:
            faults.append(fault)
    except InvalidFile as fault:
        faults.append(fault)
    return faults


def size_of(folder: Path, name: str) -> int | None:
    """Size in bytes of a plain file, links followed; None if missing, InvalidFile if not a file.

    Opening a FIFO would wait for ever, and a device may have no end.
    """
    try:
        found = os.stat(folder / name)
    except FileNotFoundError:
        if (folder / name).is_symlink():
            raise InvalidFile(name, "it is a link to a file that is not there") from None
        return None
    except (OSError, ValueError) as error:
        raise InvalidFile(name, f"it cannot be read: {_said(error)}", "check the folder") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidFile(name, f"it is {kind_of(found.st_mode)}, not a file", "put the file there")
    return found.st_size


def kind_of(mode: int) -> str:
    """What a path is, in words, where a file or a folder is expected."""
    kinds = {
        stat.S_ISREG: "a file",
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((words for test, words in kinds.items() if test(mode)), "of no known kind")


def read_text(folder: Path, name: str) -> str | None:
    """Text of a file; None where there is none."""
    size = size_of(folder, name)
    if size is None:
        return None
    if size > _JSON_BYTES:
        raise InvalidFile(name, f"it has {size:,} bytes, and {_JSON_BYTES:,} are allowed")
    try:
        return (folder / name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidFile(name, f"it is no UTF-8 text: byte {error.start}") from error
    except OSError as error:
        raise InvalidFile(name, f"it cannot be read: {_said(error)}", "check the folder") from error


def read_json(folder: Path, name: str) -> Any:
    """What a JSON file holds; None where there is no file."""
    text = read_text(folder, name)
    if text is None:
        return None
    if not text.strip():
        raise InvalidFile(name, "it is empty")
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidFile(name, "it is nested too deeply") from None
    except ValueError as error:
        raise InvalidFile(name, f"it is no JSON: {error}") from error


def read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """The same for a file that must hold a JSON object."""
    found = read_json(folder, name)
    if found is None and size_of(folder, name) is None:
        return None
    if not isinstance(found, dict):
        raise InvalidFile(name, f"it holds {short_repr(found)} where a JSON object is expected")
    return cast(dict[str, Any], found)


def short_repr(value: Any) -> str:
    """A value of a file in an error, never long."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _said(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# The Hugging Face hub and its local cache.

_HUB = "https://huggingface.co"
_HUB_TIMEOUT_S = 5.0


def hub_is_reachable() -> bool:
    """Whether the hub answers within a few seconds and may be used."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return False
    return _answers(os.environ.get("HF_ENDPOINT", _HUB))


@cache
def _answers(address: str) -> bool:
    """Asked once in a process: a run that waits again for each of its models would seem to hang."""
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_HUB_TIMEOUT_S):
            return True
    except HTTPError:
        return True  # a mirror need not have a page at its root
    except (URLError, OSError, ValueError):
        return False


def cached_revision(hub_id: str) -> str | None:
    """The commit that the hub's cache holds for a model; None where the cache does not have it."""
    try:
        return (_cached(hub_id) / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None


def cached_folder(hub_id: str) -> Path | None:
    """The folder of that commit; None where the cache does not have it."""
    revision = cached_revision(hub_id)
    if not revision or Path(revision).name != revision:
        return None
    found = _cached(hub_id) / "snapshots" / revision
    return found if found.is_dir() else None


def _cached(hub_id: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or expanded("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return cache / f"models--{hub_id.replace('/', '--')}"


# Locating the model that a key names: built in, a folder, or on the hub.

_BUILTIN = "builtin://"
_LONGEST = 96
"""Characters of a name on the hub."""
_GIVE = "give a model directory, a hub id such as org/name, or builtin://arithmetic"


def locate(path: str, *, field: str) -> str:
    """What transformers loads: a folder, or a hub id that it can fetch.

    A UserError where it would wait for a hub that does not answer, or where there is no folder.
    """
    folder = folder_of(path)
    if path.startswith(_BUILTIN) and folder is None:
        names = builtin_names()
        fix = did_you_mean(path.removeprefix(_BUILTIN), names)
        raise UserError(field, path, "no such built-in model", fix)
    wrong = path_fault(path)
    if wrong is not None:
        raise UserError(field, path, *wrong)
    if is_directory(path) or path.startswith(_BUILTIN):
        return str(folder)
    if looks_local(path):
        raise UserError(field, path, "cannot be loaded: no such folder on this machine", _GIVE)
    if not hub_is_reachable():
        if folder is None:
            why = "cannot be loaded: no such folder, and no Hugging Face hub answers that has it"
            raise UserError(field, path, why, "give a model directory, or check the network")
        return str(folder)
    return path


def folder_of(path: str) -> Path | None:
    """The folder on this machine, the hub's cache included; None where there is none."""
    if path.startswith(_BUILTIN):
        name = path.removeprefix(_BUILTIN)
        home = Path(str(resources.files("luyen") / "builtin"))
        return home / name if name in builtin_names() else None
    if is_directory(path):
        return expanded(path)
    return None if looks_local(path) else cached_folder(path)


def builtin_names() -> list[str]:
    """Names that `builtin://` knows."""
    home = resources.files("luyen") / "builtin"
    return sorted(entry.name for entry in home.iterdir() if (entry / "config.json").is_file())


def looks_local(path: str) -> bool:
    """A hub id is `name` or `org/name`; everything else is a path."""
    is_odd = "\0" in path or len(path) > _LONGEST
    return is_odd or path.startswith((".", "/", "~")) or path.count("/") > 1


def path_fault(path: str) -> tuple[str, str] | None:
    """Why a path can name no model, and what to do; None for a folder, or what may be a hub id."""
    if not path or "\0" in path:
        return f"it is no path: {'a zero byte is in it' if path else 'it is empty'}", _GIVE
    try:
        mode = os.stat(expanded(path)).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        return f"it cannot be looked at: {said}", _GIVE
    if not stat.S_ISDIR(mode):
        return f"it is {kind_of(mode)}, not a folder", _GIVE
    if not os.access(expanded(path), os.R_OK | os.X_OK):
        return "the folder may not be read", "change its permissions"
    return None


# Files of a model by part: weights, tokenizer, chat template, config, code.

Part: TypeAlias = tuple[tuple[Path, ...], str | None]
"""Files on this machine, or the revision of the hub that stands for them."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece")


def model_parts(path: str, folder: Path) -> dict[str, Part]:
    """Part -> its files, for a directory or a `builtin://` name; for a hub id, its revision.

    Example:
        >>> sorted(model_parts("builtin://arithmetic", Path()))
        ['config', 'tokenizer', 'weights']
    """
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files("luyen") / "builtin")) / path.removeprefix(_BUILTIN)
    else:
        home = folder / expanded(path)
    if not home.is_dir():
        return {"revision": ((), cached_revision(path))}
    parts: dict[str, list[Path]] = {}
    for file in sorted(home.iterdir()):
        part = _part(file.name)
        if part is not None and file.is_file():
            parts.setdefault(part, []).append(file)
    return {part: (tuple(files), None) for part, files in parts.items()}


def _part(name: str) -> str | None:
    """What a file decides; None for one that decides nothing.

    Example:
        >>> _part("model-00001-of-00002.safetensors"), _part("README.md")
        ('weights', None)
    """
    if name.endswith(_WEIGHTS):
        return "weights"
    if name.startswith("chat_template") or name.endswith(".jinja"):
        return "template"
    if name.startswith(_TOKENIZER) or name.endswith((".model", ".tiktoken")):
        return "tokenizer"
    if name in ("config.json", "generation_config.json", "adapter_config.json"):
        return "config"
    return "code" if name.endswith(".py") else None
