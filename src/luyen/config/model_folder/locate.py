"""Where a model lies that a key names: in the package, in a folder, or on the hub."""

import os
import stat
from importlib import resources
from pathlib import Path

from luyen.base.errors import UserError
from luyen.base.paths import expanded, is_directory
from luyen.base.suggest import did_you_mean
from luyen.config.hub import cached_folder, hub_is_reachable
from luyen.config.model_folder.files import kind_of

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
            raise UserError(field, path, why, "give a model directory, or mend the network")
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
        return "the folder may not be read", "mend its permissions"
    return None
