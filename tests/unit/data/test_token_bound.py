"""No row that fits is lost: a text never has fewer tokens than its length in characters says."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from luyen.data.formats.records import TextRow
from luyen.data.offline import is_surely_longer
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer, longest_token

SAID = ["the cat sat on the mat " * 4, "12 + 34 = 46", "漢字 e\u0301 ......... =========="] * 8
SHOWN = Renderer(load_tokenizer("builtin://arithmetic"))


def byte_pairs(normaliser: normalizers.Normalizer | None = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normaliser is not None:
        made.normalizer = normaliser
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(SAID, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.add_special_tokens(["<|im_end|>"])
    return made


def spaced() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.train_from_iterator(SAID, trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"]))
    return made


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "byte pairs": byte_pairs,
    "composed first": lambda: byte_pairs(normalizers.NFC()),
    "compatible first": lambda: byte_pairs(normalizers.NFKC()),
    "spaces written": spaced,
}
MADE = {name: make() for name, make in KNOWN.items()}
ALPHABET = "the cat=.1漢e\u0301\u1112\u1161\u11ab\ufb03 \n<|im_end|>"
TEXTS = st.text(max_size=60) | st.text(alphabet=ALPHABET, max_size=60)


@pytest.mark.parametrize("name", MADE)
@given(text=TEXTS)
def test_a_text_has_no_fewer_tokens_than_its_length_says(name: str, text: str) -> None:
    longest = longest_token(MADE[name].to_str())
    assert longest is not None
    assert len(text) // longest <= len(MADE[name].encode(text, add_special_tokens=False).ids)


@given(text=TEXTS)
def test_nor_does_the_built_in_tokenizer(text: str) -> None:
    tokenizer = SHOWN.tokenizer
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens("1" * 1000) > 0


def dropping() -> dict[str, Tokenizer]:
    """Tokenizers of which a token may stand for any amount of text."""
    words = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    fused = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    stripped = byte_pairs(normalizers.Strip())
    removed = byte_pairs()
    removed.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    greedy = byte_pairs()
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    named = {"words": words, "pieces": pieces, "fused": fused}
    return named | {"stripped": stripped, "removed": removed, "greedy": greedy}


@pytest.mark.parametrize("name", dropping())
def test_of_tokenizers_that_drop_text_nothing_is_said(name: str) -> None:
    assert longest_token(dropping()[name].to_str()) is None


def test_text_that_is_far_too_long_is_not_read(tmp_path: Path) -> None:
    row = TextRow(text="1 " * 10_000_000)
    began = time.monotonic()
    assert is_surely_longer(row, SHOWN, 64)
    assert time.monotonic() - began < 1.0
    assert not is_surely_longer(TextRow(text="1+1=2"), SHOWN, 5)
