"""A sampler class from a file of the user's."""

import importlib.util
from collections.abc import Callable
from typing import Any

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary
from luyen.base.paths import expanded
from luyen.base.suggest import did_you_mean


def load_sampler_class(class_path: str, class_name: str) -> Callable[..., Any]:
    """The named class; it is made as `Class(prompts, seed=..., **kwargs)` and has `take`."""
    path = expanded(class_path)
    spec = importlib.util.spec_from_file_location(f"luyen_sampler_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        why = "no Python file is there"
        raise UserError("data.sampler.class_path", class_path, why, "mend the path")
    module = importlib.util.module_from_spec(spec)
    faults: list[BaseException] = []
    with boundary(faults):
        spec.loader.exec_module(module)
    if faults:
        why = f"importing it failed: {last_line(faults[0])}"
        raise UserError("data.sampler.class_path", class_path, why, "mend the file") from faults[0]
    if class_name not in vars(module):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        why = f"{class_path} defines no such class"
        raise UserError(
            "data.sampler.class_name", class_name, why, did_you_mean(class_name, classes)
        )
    return vars(module)[class_name]
