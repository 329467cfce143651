"""Token ids, special tokens and token text, read from tokenizer.json."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, final

from tokenizers import Tokenizer

from luyen.base.input_files import expanded, parse_json, read_bytes
from luyen.config.schema.model import ModelConfig

_BUILTIN = "builtin://"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids a tokenizer knows.

    Example:
        >>> read_vocabulary(ModelConfig()).size
        128
    """

    size: int
    """One more than the largest id."""
    special: frozenset[int]
    """Ids that no text is cut into by chance: markers of turns, ends, calls."""
    unknown: int | None
    """Id that stands for what has no token; None where everything has one."""


def read_vocabulary(model: ModelConfig) -> Vocabulary | None:
    """The vocabulary in `tokenizer.json`; None where no such file is on this machine."""
    for file in tokenizer_files(model.tokenizer_path or model.path):
        try:
            return _vocabulary(parse_json(read_bytes(file)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # missing here, or of a kind that says it otherwise
    return None


def tokenizer_files(path: str) -> Iterator[Path]:
    """Where the `tokenizer.json` of a model may lie on this machine."""
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files("luyen") / "builtin"))
        yield home / path.removeprefix(_BUILTIN) / "tokenizer.json"
        return
    yield expanded(path) / "tokenizer.json"
    home = Path(os.environ.get("HF_HOME") or expanded("~/.cache/huggingface"))
    snapshots = home / "hub" / f"models--{path.replace('/', '--')}" / "snapshots"
    yield from sorted(snapshots.glob("*/tokenizer.json"), reverse=True)


def _vocabulary(page: Any) -> Vocabulary:
    added = {int(token["id"]): str(token["content"]) for token in page["added_tokens"]}
    marks = {int(token["id"]) for token in page["added_tokens"] if token.get("special")}
    known, unknown = page["model"]["vocab"], page["model"].get("unk_token")
    if isinstance(known, list):  # unigram: pairs of text and score, the id is the place
        ids, unknown_id = list(range(len(known))), page["model"].get("unk_id")
    else:
        ids, unknown_id = [int(i) for i in known.values()], known.get(unknown)
    if unknown_id is None:
        unknown_id = next((i for i, text in added.items() if text == unknown), None)
    special = frozenset(marks - {unknown_id})
    return Vocabulary(size=max([*ids, *added]) + 1, special=special, unknown=unknown_id)


# Tokens as text, one by one, without a model library: by the tokenizer's own file.


@final
class TokenText:
    """What each token of a run reads as; its number where the tokenizer is not here."""

    def __init__(self, model: ModelConfig) -> None:
        self._backend = _load(model)

    @property
    def is_known(self) -> bool:
        """Whether the tokenizer's file is on this machine."""
        return self._backend is not None

    def __call__(self, token: int) -> str:
        """The text of one token; a part of a character is shown as its piece."""
        if self._backend is None:
            return f"[{token}]"
        text: str = self._backend.decode([token], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return self._with_space(token, text)
        piece: str | None = self._backend.id_to_token(token)
        return f"[{token}]" if piece is None else piece

    def _with_space(self, token: int, text: str) -> str:
        """The text with the space before it that some decoders strip from a first token."""
        piece: str | None = self._backend.id_to_token(token) if self._backend is not None else None
        is_marked = piece is not None and piece.startswith(("▁", "Ġ"))
        return f" {text}" if is_marked and not text.startswith(" ") else text


def _load(model: ModelConfig) -> Tokenizer | None:
    for file in tokenizer_files(model.tokenizer_path or model.path):
        if file.is_file():
            try:
                return Tokenizer.from_str(read_bytes(file).decode())
            except (OSError, ValueError):
                continue
    return None
