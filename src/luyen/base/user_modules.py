"""Files of user code as modules: the name of each, and the files that stand for live objects.

A Python file that a configuration names is loaded under a name made from its path, so that rewards
and tools of one file share one module. Where the file was written from objects of this process
(`luyen.train(reward=function)`), the module holds the objects themselves, and nothing is imported.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def module_name(path: Path) -> str:
    """Name under which a file that a configuration names is loaded.

    Example:
        >>> module_name(Path("/a/reward.py"))
        'luyen_file_reward_040fd5f4'
    """
    file = path.expanduser().resolve()
    mark = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
    return f"luyen_file_{file.stem}_{mark}"


def loaded_module(path: Path) -> ModuleType | None:
    """The module of a file in this process; None: it is not loaded.

    Example:
        >>> loaded_module(Path("/no/such/file.py"))
    """
    return sys.modules.get(module_name(path))


def hold_objects(path: Path, members: Mapping[str, Any]) -> None:
    """Let a file stand for these objects in this process.

    A module that is there is changed in place: code that has loaded it sees the newest objects.

    Example:
        >>> hold_objects(Path("/a/held.py"), {"limit": 3})
        >>> vars(loaded_module(Path("/a/held.py")))["limit"]
        3
    """
    name = module_name(path)
    module = sys.modules.get(name) or ModuleType(name)
    module.__file__ = str(path.resolve())
    vars(module).update(members)
    sys.modules[name] = module
