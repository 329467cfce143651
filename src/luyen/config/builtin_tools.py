"""What the `config` of a built-in tool may say, known without importing the tool.

The sandbox knows the limits of `python`; here only its name is looked at.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from luyen.base.paths import expanded
from luyen.base.reading import require_file
from luyen.base.suggest import did_you_mean

Wrong: TypeAlias = tuple[str, Any, str, str]
"""Key below an entry, value, reason, fix."""
MODES = ("words", "key")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_Kind: TypeAlias = tuple[Callable[[Any], bool], str]
_NAME: dict[str, _Kind] = {"name": (_is_word, "a name")}
SETTINGS: dict[str, dict[str, _Kind] | None] = {
    "calculator": _NAME,
    "python": None,
    "search": {
        "path": (_is_word, "the path of a JSONL file"),
        "documents": (lambda value: isinstance(value, dict), "a mapping of keys to texts"),
        "key_field": (_is_word, "a name"),
        "text_field": (_is_word, "a name"),
        "mode": (lambda value: value in MODES, "`words` or `key`"),
        "top_k": (_is_count, "a whole number from 1"),
        **_NAME,
        "description": (lambda value: isinstance(value, str), "text"),
    },
}
"""Tool -> its settings and what each must be; None: only the tool knows."""


def wrong_settings(tool: str, config: Mapping[str, Any], folder: Path) -> Iterator[Wrong]:
    """What is wrong with the `config` of a built-in tool; paths begin at `folder`."""
    known = SETTINGS[tool]
    for key, value in config.items():
        kinds = _NAME if known is None else known
        if key in kinds:
            is_fit, what = kinds[key]
            if not is_fit(value) and not (value is None and key in ("path", "documents")):
                yield f".config.{key}", value, f"expected {what}", "mend the value"
        elif known is not None:
            yield (
                f".config.{key}",
                value,
                "the tool has no such setting",
                did_you_mean(str(key), known),
            )
    if tool == "search":
        yield from _wrong_search(config, folder)


def _wrong_search(config: Mapping[str, Any], folder: Path) -> Iterator[Wrong]:
    path = config.get("path")
    if (path is None) == (config.get("documents") is None):
        why = "a search needs either a file or documents"
        yield ".config.path", path, why, "set `path`, or `documents: {KEY: TEXT}`"
    elif isinstance(path, str):
        try:
            require_file(folder / expanded(path))
        except OSError as error:
            why = f"cannot be read: {error}"
            yield ".config.path", path, why, "give a readable JSONL file"
