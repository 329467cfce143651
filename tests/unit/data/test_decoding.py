"""Ids back to text: asked directly, a tokenizer says what transformers makes it say."""

import json
import tempfile
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Rust

from luyen.data.tokenizer import Tokenizer, load_tokenizer, resolve_path
from tests.character_tokenizer import build_character_tokenizer
from tests.unit.data.families import FAMILIES, HOME, family_renderer
from tests.unit.data.templates import TEMPLATES, tokenizer

ARITHMETIC = "builtin://arithmetic"
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BY_BYTES = (*(f"<0x{number:02X}>" for number in range(256)), "▁", "▁a", "é", ",")
PIECES = ("a", "##b", "##'", "s", "n", "'", "t", ",", ".", "!", "do", "##ing", "<", ">")
LONG = 5000
"""More ids than are read at once."""


def learned(model: Any, decoder: Any) -> Any:
    made: Any = Rust(model)
    made.decoder = decoder
    return made


def by_bytes() -> Any:
    vocabulary = {mark: i for i, mark in enumerate((*SPECIAL, *BY_BYTES))}
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return learned(models.WordLevel(vocabulary, unk_token="<unk>"), decoder)


def of_bytes() -> Any:
    vocabulary = {mark: i for i, mark in enumerate((*SPECIAL, *BYTES))}
    return learned(models.BPE(vocabulary, []), decoders.ByteLevel())


def of_pieces() -> Any:
    vocabulary = {mark: i for i, mark in enumerate((*SPECIAL, *PIECES))}
    return learned(
        models.WordPiece(vocabulary, unk_token="<unk>"), decoders.WordPiece(cleanup=False)
    )


LEARNED = {"of bytes": of_bytes, "by bytes": by_bytes, "of pieces": of_pieces}
"""Kinds that people train: a token may be half a character, or a word without its space."""
SHIPPED = (ARITHMETIC, "builtin://tools", "glm", *TEMPLATES, *FAMILIES, *LEARNED)


def write(folder: Path, made: Any) -> None:
    """Files that ask for cleaned spaces, which nobody here wants."""
    made.add_special_tokens([AddedToken(w, normalized=False, special=True) for w in SPECIAL])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    (folder / "tokenizer.json").write_text(made.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@lru_cache
def shipped(name: str) -> Tokenizer:
    """A tokenizer that comes with the package, or one of these tests."""
    if name in TEMPLATES:
        return tokenizer(name)
    if name in FAMILIES:
        return family_renderer(name).tokenizer
    if name.startswith("builtin://"):
        return load_tokenizer(name)
    with tempfile.TemporaryDirectory() as folder:
        if name in LEARNED:
            write(Path(folder), LEARNED[name]())
        else:
            template = (HOME / f"{name}_like.jinja").read_text()
            build_character_tokenizer(Path(folder), chat_template=template)
        return load_tokenizer(folder)


def by_transformers(found: Tokenizer, ids: list[int], *, skip_special: bool) -> str:
    return found._backend.decode(
        ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("name", SHIPPED)
@given(data=st.data())
def test_ids_read_as_transformers_reads_them(name: str, data: st.DataObject):
    found = shipped(name)
    assert found._rust is not None, "it is not asked directly, and nothing is compared"
    # A model may have rows that mean nothing to its tokenizer.
    ids = data.draw(st.lists(st.integers(0, found.size + 9), max_size=60))
    for skip in (False, True):
        expected = by_transformers(found, ids, skip_special=skip)
        assert found.decode(ids, skip_special=skip) == expected
        assert found.decode(tuple(ids), skip_special=skip) == expected
        assert found.decode(array("l", ids), skip_special=skip) == expected


def test_special_tokens_are_left_out_on_request_and_spaces_stay_as_they_are():
    found = shipped("of pieces")
    ids = [found._backend.convert_tokens_to_ids(word) for word in ("do", "##ing", ",", "</s>")]
    assert found._backend.decode(ids) == "doing, </s>", "the files do not ask for cleaned spaces"
    assert found.decode(ids, skip_special=False) == "doing , </s>"
    assert found.decode(ids) == "doing ,"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_long_text_that_goes_the_other_way_reads_the_same(name: str):
    found = shipped(name)
    ids = [(7 * i + i // 11) % found.size for i in range(LONG)]
    for skip in (False, True):
        expected = found._rust.decode(ids, skip_special_tokens=skip)
        assert found.decode(ids, skip_special=skip) == expected


@pytest.mark.parametrize("method", ["decode", "_decode"])
def test_a_kind_of_tokenizer_that_writes_in_its_own_way_is_asked_itself(method: str):
    plain = load_tokenizer(ARITHMETIC)
    kind: Any = type(plain._backend)

    def shouted(self: Any, *given: Any, **how: Any) -> str:
        return getattr(kind, method)(self, *given, **how).upper()

    own: Any = type("Loud", (kind,), {method: shouted})
    loud = Tokenizer(own.from_pretrained(resolve_path(ARITHMETIC)), path="loud")
    ids = plain.encode("ab<|im_end|>")
    assert (plain.decode(ids), loud.decode(ids)) == ("ab", "AB")
