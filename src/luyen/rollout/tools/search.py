"""Search in a collection of texts on this machine: by words, or by exact key.

The order of what is found depends on the collection and the query alone.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, final

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.reading import require_file
from luyen.rollout.tools.builtin import builtin_tools
from luyen.rollout.tools.function import FunctionTool

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75
_NOTHING = "Nothing was found."


@builtin_tools.register("search")
def search_tool(
    *,
    path: str | None = None,
    documents: Mapping[str, str] | None = None,
    key_field: str = "title",
    text_field: str = "text",
    mode: Literal["words", "key"] = "words",
    top_k: int = 3,
    name: str = "search",
    description: str = "Search a collection of texts.",
) -> FunctionTool:
    """The tool over a JSONL file, or over documents written in the tool file.

    `words` ranks texts by the words they share with the query (BM25); `key` gives the text of
    exactly this key, upper and lower case alike.
    """
    if (path is None) == (documents is None):
        why = "a search needs either a file or documents"
        raise UserError("config.path", path, why, "set `path`, or `documents: {KEY: TEXT}`")
    if mode not in ("words", "key"):
        raise UserError("config.mode", mode, "no such way to search", "set `words` or `key`")
    if top_k < 1:
        raise UserError("config.top_k", top_k, "nothing would ever be found", "set it to 1 or more")
    if not isinstance(cast(object, documents), Mapping | None):
        raise UserError("config.documents", documents, "it is no mapping", "write {KEY: TEXT}")
    pairs = list((documents or {}).items())
    if path is not None:
        pairs = _read(path, key_field, text_field)
    texts = {str(key): str(text) for key, text in pairs}
    index = Index(list(texts.items())) if mode == "words" else None
    by_key = {_folded(key): text for key, text in texts.items()}

    async def search(query: str) -> str:
        if index is None:
            return by_key.get(_folded(query), _NOTHING)
        found = [
            f"[{i}] {key}: {text}" for i, (key, text) in enumerate(index.best(query, top_k), 1)
        ]
        return "\n".join(found) or _NOTHING

    search.__doc__ = description
    return FunctionTool(search, name=name)


@final
class Index:
    """Texts ranked by BM25 over key and text; ties keep the order of the collection.

    Example:
        >>> index = Index([("Rome", "Capital of Italy."), ("Paris", "Capital of France.")])
        >>> index.best("the capital of France", 1)
        [('Paris', 'Capital of France.')]
    """

    def __init__(self, texts: Sequence[tuple[str, str]]) -> None:
        self._texts = list(texts)
        counts = [Counter(_words(f"{key} {text}")) for key, text in texts]
        self._lengths = [counted.total() for counted in counts]
        self._mean = sum(self._lengths) / max(len(texts), 1) or 1.0
        self._where: dict[str, list[tuple[int, int]]] = {}
        for number, counted in enumerate(counts):
            for word, times in counted.items():
                self._where.setdefault(word, []).append((number, times))

    def best(self, query: str, most: int) -> list[tuple[str, str]]:
        """The texts that share words with the query, the best first."""
        scores: dict[int, float] = {}
        for word in sorted(set(_words(query))):
            found = self._where.get(word, [])
            rarity = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = _K1 * (1 - _B + _B * self._lengths[number] / self._mean)
                gain = rarity * times * (_K1 + 1) / (times + norm)
                scores[number] = scores.get(number, 0.0) + gain
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._texts[number] for number in ranked[:most]]


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _folded(key: str) -> str:
    return " ".join(key.casefold().split())


def _read(path: str, key_field: str, text_field: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    number = 0
    try:
        with require_file(expanded(path)).open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    found.append(_pair(line, key_field, text_field))
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {error}"
        raise UserError("config.path", path, why, "give a readable JSONL file") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"line {number} is no object with `{key_field}` and `{text_field}`"
        fix = "mend the line, or set `key_field` and `text_field`"
        raise UserError("config.path", path, why, fix) from error
    return found


def _pair(line: str, key_field: str, text_field: str) -> tuple[str, str]:
    row: Any = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("no object")
    held = cast(dict[str, Any], row)
    return str(held[key_field]), str(held[text_field])
