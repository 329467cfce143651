"""How much text one token can stand for: what is far too long is refused before it is read.

A tokenizer of which this is known never drops text and never makes one token of what has none in
its vocabulary, however long. Of the others nothing is said, and their text is read to its end.
"""

import json
from typing import Any, cast

_COMPOSED = 4
"""Characters that a normal form may write as one."""
_NORMALISED = {
    "NFC": _COMPOSED,
    "NFKC": _COMPOSED,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Kind of a normaliser -> characters that it may write as one."""
_SPLITS = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts")
_EACH_ALONE = ("[\\s\\S]", "(?s:.)")
"""Patterns that make a piece of every character."""


def longest_token(page: str) -> int | None:
    """Most characters of text that one token covers, by a `tokenizer.json`; None: unknown.

    Example:
        >>> longest_token('{"model": {"type": "BPE", "vocab": {"a": 0, "ab": 1}, '
        ...               '"byte_fallback": true}, "added_tokens": [{"content": "<end>"}]}')
        5
    """
    read: dict[str, Any] = json.loads(page)
    model: dict[str, Any] = read["model"]
    added: list[dict[str, Any]] = read.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token takes all white space beside it
    factor = _factor(read.get("normalizer"))
    pieces = list(_kinds(read.get("pre_tokenizer")))
    if factor is None or not all(map(_keeps_all, pieces)) or not _covers(model, pieces):
        return None
    names: list[str] = [token["content"] for token in added]
    if model.get("type") == "Unigram":
        names += [one[0] for one in model["vocab"]]
    else:
        names += model["vocab"]
    return factor * max(map(len, names), default=1)


def _kinds(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or a pre-tokenizer, those of a sequence one by one."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner: Any = part.get("normalizers") or part.get("pretokenizers") or []
    return [kind for one in cast(list[dict[str, Any]], inner) for kind in _kinds(one)]


def _factor(normaliser: dict[str, Any] | None) -> int | None:
    """Characters that a normaliser may write as one; None: it may leave some out."""
    factor = 1
    for step in _kinds(normaliser):
        if step["type"] == "Replace":
            wanted = step["pattern"].get("String")
            if wanted is None or len(step["content"]) < len(wanted):
                return None
        elif step["type"] in _NORMALISED:
            factor *= _NORMALISED[step["type"]]
        else:
            return None
    return factor


def _keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _SPLITS and step.get("behavior") != "Removed"


def _covers(model: dict[str, Any], pieces: list[dict[str, Any]]) -> bool:
    """Whether every character, known or not, is part of a token that is in the vocabulary."""
    if model.get("byte_fallback"):
        return True
    if model.get("type") == "WordLevel":  # any piece is one token: they must be single characters
        patterns = [step.get("pattern", {}).get("Regex") for step in pieces]
        return any(pattern in _EACH_ALONE for pattern in patterns)
    if model.get("type") != "BPE" or model.get("fuse_unk"):
        return False
    is_bytes = any(step["type"] == "ByteLevel" for step in pieces)
    return (is_bytes and len(model["vocab"]) >= 256) or model.get("unk_token") is not None
