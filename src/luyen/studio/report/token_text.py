"""Tokens as text, one by one, without a model library: by the tokenizer's own file."""

from typing import final

from tokenizers import Tokenizer

from luyen.base.reading import read_bytes
from luyen.config.schema.model import Model
from luyen.studio.doctor.vocabulary import tokenizer_files


@final
class TokenText:
    """What each token of a run reads as; its number where the tokenizer is not here."""

    def __init__(self, model: Model) -> None:
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


def _load(model: Model) -> Tokenizer | None:
    for file in tokenizer_files(model.tokenizer_path or model.path):
        if file.is_file():
            try:
                return Tokenizer.from_str(read_bytes(file).decode())
            except (OSError, ValueError):
                continue
    return None
