"""The tokenizer: nothing is added silently, and a turn ends where all three parties say."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.data.tokenizer import Tokenizer, load_tokenizer, resolve_path
from tests.character_tokenizer import CHARACTERS, build_character_tokenizer
from tests.unit.data.templates import HEADER_TOKENS, HEADERS, tokenizer, user

BUILTIN = "builtin://arithmetic"


def test_the_shipped_files_are_what_the_function_writes(tmp_path: Path):
    build_character_tokenizer(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(written) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    home = Path(resolve_path(BUILTIN))
    assert {name: (home / name).read_text() for name in written} == written
    config = json.loads((home / "config.json").read_text())
    assert config["vocab_size"] == load_tokenizer(BUILTIN).size == 128


def test_every_character_is_one_token_and_reads_back():
    found = load_tokenizer(BUILTIN)
    assert len(CHARACTERS) == 96
    ids = found.encode(CHARACTERS)
    assert len(ids) == len(set(ids)) == 96
    assert found.decode(ids) == CHARACTERS
    assert found.encode("é→") == [0, 0]


def test_markup_is_one_token_that_decoding_keeps_and_special_tokens_are_dropped_on_request():
    found = load_tokenizer(BUILTIN)
    ids = found.encode("<think>1</think><|im_end|>")
    assert len(ids) == 4
    assert found.decode(ids) == "<think>1</think>"
    assert found.decode(ids, skip_special=False) == "<think>1</think><|im_end|>"
    reserved = found.encode("<reserved_3>")
    assert len(reserved) == 1
    assert found.decode(reserved) == "<reserved_3>"


def test_encoding_adds_no_special_token():
    assert tokenizer("headers").encode("") == []
    assert len(tokenizer("headers").encode("12")) == 2


def test_spans_say_which_characters_a_token_covers():
    ids, spans = load_tokenizer(BUILTIN).encode_spans("a<think>b")
    assert len(ids) == 3
    assert spans == [(0, 1), (1, 8), (8, 9)]


def test_a_turn_ends_by_the_word_of_tokenizer_model_and_template(tmp_path: Path):
    build_character_tokenizer(
        tmp_path, chat_template=HEADERS, special_tokens=HEADER_TOKENS, turn_end="<|eot_id|>"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|begin_of_text|>"
    config["additional_special_tokens"] = list(HEADER_TOKENS[1:])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def stops(named: object) -> set[str]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        found = load_tokenizer(str(tmp_path))
        return {found.decode([i], skip_special=False) for i in found.stop_ids}

    assert stops(None) == {"<|begin_of_text|>", "<|eot_id|>"}
    assert stops(1) == {"<|begin_of_text|>", "<|eot_id|>", "<|endoftext|>"}
    assert stops([1, 3]) == {"<|begin_of_text|>", "<|eot_id|>", "<|endoftext|>", HEADER_TOKENS[1]}
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).stop_ids == {2, 5}


def test_the_model_may_lie_elsewhere_than_its_tokenizer(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text('{"eos_token_id": 77}')
    assert 77 in load_tokenizer(BUILTIN, model_path=str(model)).stop_ids
    assert 77 not in load_tokenizer(BUILTIN).stop_ids


@pytest.mark.parametrize(
    ("name", "text", "trailing"),
    [
        ("chatml", "<|im_end|>", "\n"),
        ("headers", "<|eot_id|>", ""),
        ("always prompts", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("plain", "\n", ""),
    ],
)
def test_the_end_of_a_turn_is_found_in_the_template(name: str, text: str, trailing: str):
    end = tokenizer(name).turn_end
    assert end is not None
    assert (end.text, end.trailing) == (text, trailing)
    assert (end.token is None) == (name == "plain")


def test_a_tokenizer_survives_a_trip_to_another_process():
    found = pickle.loads(pickle.dumps(load_tokenizer(BUILTIN)))
    assert found.decode(found.encode("12+34=")) == "12+34="
    assert found.stop_ids == load_tokenizer(BUILTIN).stop_ids


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="did you mean `arithmetic`"):
        load_tokenizer("builtin://arithmetik")
    with pytest.raises(UserError, match=r"tokenizer\.json: it is not there"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_a_template_encodes_but_does_not_chat(tmp_path: Path):
    shutil.copytree(resolve_path(BUILTIN), tmp_path / "base")
    file = tmp_path / "base" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    found = load_tokenizer(str(tmp_path / "base"))
    assert found.turn_end is None
    assert found.decode(found.encode("7")) == "7"
    with pytest.raises(UserError, match=r"no chat template.*instruction-tuned"):
        found.apply_template([user("1+1=")])


def test_a_template_that_refuses_a_conversation_names_the_roles(tmp_path: Path):
    refuses = "{%- if messages | length > 2 -%}{{ raise_exception('too long') }}{%- endif -%}"
    refuses += "{{ messages[0].content }}"
    build_character_tokenizer(tmp_path, chat_template=refuses)
    found = load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="refuses a conversation of user, user, user: too long"):
        found.apply_template([user("a")] * 3)


def test_files_that_ask_for_padding_and_truncation_change_no_ids(tmp_path: Path):
    build_character_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tree["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    file.write_text(json.dumps(tree))
    plain, odd = load_tokenizer(BUILTIN), load_tokenizer(str(tmp_path))
    for text in ("", "1+2=", "<think>é</think><|im_end|>"):
        assert odd.encode(text) == plain.encode(text)
        assert odd.encode_spans(text) == plain.encode_spans(text)
        whole = plain._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        assert odd.encode_spans(text) == (whole["input_ids"], whole["offset_mapping"])


def test_a_kind_of_tokenizer_that_reads_in_its_own_way_is_asked_itself():
    plain = load_tokenizer(BUILTIN)
    kind: Any = type(plain._backend)

    def shouted(self: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        return kind._encode_plus(self, text.upper(), *args, **kwargs)

    own: Any = type("Loud", (kind,), {"_encode_plus": shouted})
    loud = Tokenizer(own.from_pretrained(resolve_path(BUILTIN)), path="loud")
    assert loud.encode("ab") == plain.encode("AB") != plain.encode("ab")
    assert loud.encode_spans("ab")[0] == plain.encode("AB")
