"""Python files of the user: loaded once per process, whoever asks first."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary
from luyen.base.suggest import did_you_mean


def load_module(path: str, *, field: str) -> ModuleType:
    """The module of a file, loaded at most once; a UserError about `field` when it cannot be."""
    file = Path(path).expanduser().resolve()
    for module in list(sys.modules.values()):
        if vars(module).get("__file__") == str(file):
            return module
    name = (
        f"luyen_file_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    )
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(field, path, "no such Python file", "mend the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    faults: list[BaseException] = []
    with boundary(faults):
        spec.loader.exec_module(module)
    if faults:
        sys.modules.pop(name, None)
        why = f"importing it failed: {last_line(faults[0])}"
        raise UserError(field, path, why, "mend the file") from faults[0]
    return module


def load_function(path: str, name: str, *, field: str) -> Callable[..., Any]:
    """A function of a file; a UserError with near names when there is none."""
    module = load_module(path, field=f"{field}.path")
    found = vars(module).get(name)
    if callable(found):
        return found
    functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
    why = f"{path} defines no function of this name"
    raise UserError(f"{field}.name", name, why, did_you_mean(name, functions))


def takes(function: Callable[..., Any], names: Sequence[str]) -> bool:
    """Whether a function can be called with exactly these keyword arguments."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True
