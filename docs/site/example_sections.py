"""Docstrings of this package have a section `Example:`, which mkdocstrings calls `Examples:`."""

import re
from typing import Any

import griffe

_HEAD = re.compile(r"^Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Renames the section, so that its doctest is shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _HEAD.sub("Examples:", obj.docstring.value)
