"""Layer 7: the training loops. Start reading at `luyen.train.loop`.

`luyen.train(...)` is a function of the public surface, and this package has its name: once it is
imported, it stands in the function's place and is called as it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that can be called as `luyen.api.train`."""

    def __call__(self, *sources: Any, **options: Any) -> Any:
        """Train, and return the run."""
        # By name: the function lies in a layer above this one.
        return import_module("luyen.api").train(*sources, **options)


sys.modules[__name__].__class__ = _CallablePackage
