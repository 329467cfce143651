"""Constrained answers: what a grammar allows, in engines and by itself, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luyen.base.errors import UserError
from luyen.base.seeds import derive_key
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.rollout.constraints import (
    call_constraint,
    choice_constraint,
    json_object_constraint,
    json_schema_constraint,
    regex_constraint,
)
from luyen.rollout.parsers.json_formats import DEEPSEEK_SEPARATOR
from luyen.rollout.parsers.llama3 import parse_llama3
from luyen.rollout.parsers.protocol import tool_parsers
from luyen.rollout.protocol import Request, Sampling, TokenConstraint, generate
from tests.byte_pairs import build_byte_pair_tokenizer
from tests.generation import native, plain_logits
from tests.optional import needs
from tests.tiny_models import tiny_policy

pytestmark = needs("llguidance")

MARKS = (
    "[TOOL_CALLS]",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    DEEPSEEK_SEPARATOR,
)
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["x", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["characters", "bytes", "bytes with marks"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    if request.param == "characters":
        return load_tokenizer("builtin://tools")
    folder = tmp_path_factory.mktemp("tokenizer")
    build_byte_pair_tokenizer(folder, marks=MARKS if "marks" in request.param else ())
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return load_tokenizer("builtin://arithmetic")


def answers(
    tokenizer: Tokenizer, constraint: TokenConstraint, *, samples: int = 6, new: int = 90, **more
) -> list[tuple[str, str]]:
    """(text, why it ended) of answers that random weights give."""
    policy = tiny_policy("llama", vocabulary=tokenizer.size, vocab_size=512, initializer_range=0.1)
    sampling = Sampling(max_new_tokens=new, stop_ids=tokenizer.stop_ids, **more)
    keys = tuple(derive_key(3, "test", i) for i in range(samples))
    asked = Request(id="a", tokens=(5, 6, 7), keys=keys, sampling=sampling, constraint=constraint)
    return [
        (
            tokenizer.decode(
                [t for t in done.tokens if t not in tokenizer.stop_ids], skip_special=False
            ),
            done.reason,
        )
        for done in generate(native(policy, rows=4), [asked]).values()
    ]


def follow(constraint: TokenConstraint, tokens: list[int]) -> list[bool]:
    """Whether each token was allowed, up to the first that was not."""
    state, found = constraint.start(), []
    for token in tokens:
        found.append(not state.is_finished and bool(state.allowed()[token]))
        if not found[-1]:
            break
        state.accept(token)
    return found


def test_answers_are_objects_of_the_schema(tokenizer: Tokenizer):
    found = answers(tokenizer, json_schema_constraint(POINT, tokenizer))
    assert {reason for _, reason in found} == {"stop"}
    for text, _ in found:
        read = json.loads(text)
        assert set(read) == {"x", "on"}
        assert 0 <= read["x"] <= 99
        assert isinstance(read["on"], bool)
    assert len({text for text, _ in found}) > 3


def test_an_object_without_a_schema_is_an_object(tokenizer: Tokenizer):
    constraint = json_object_constraint(tokenizer)
    text = '{"a": [1, {"b": null}], "c": "d"}'
    assert all(follow(constraint, tokenizer.encode(text)))
    assert not all(follow(constraint, tokenizer.encode("[1]")))
    ended = [text for text, reason in answers(tokenizer, constraint) if reason == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("pattern", [r"[a-c]{2,5}", r"(yes|no)(, (yes|no)){0,3}", r"\d{3}-\d{4}"])
def test_answers_match_a_regular_expression(tokenizer: Tokenizer, pattern: str):
    for text, reason in answers(tokenizer, regex_constraint(pattern, tokenizer)):
        assert reason == "stop"
        assert re.fullmatch(pattern, text)


def test_answers_are_among_the_choices(tokenizer: Tokenizer):
    options = ["red", "green", "gr", 'a "quoted" one', "two\nlines"]
    found = answers(tokenizer, choice_constraint(options, tokenizer), samples=20)
    assert {text for text, _ in found} <= set(options)
    assert len({text for text, _ in found}) > 2


def test_a_stop_token_is_allowed_exactly_where_the_grammar_may_end(tokenizer: Tokenizer):
    constraint = choice_constraint(["gr", "green"], tokenizer)
    stops = sorted(tokenizer.stop_ids)
    state, written = constraint.start(), ""
    for letter in "green":
        assert state.allowed()[stops].any() == (written == "gr")
        assert state.allowed()[stops].all() == (written == "gr")
        assert not state.is_finished
        [token] = tokenizer.encode(letter)
        state.accept(token)
        written += letter
    assert state.is_finished
    other = constraint.start()
    for token in (*map(tokenizer.encode, "gr"), [stops[-1]]):
        assert not other.is_finished
        other.accept(token[0])
    assert other.is_finished


def test_greedy_takes_the_likeliest_allowed_token(tokenizer: Tokenizer):
    constraint = json_schema_constraint(POINT, tokenizer)
    policy = tiny_policy("llama", vocabulary=tokenizer.size, vocab_size=512)
    sampling = Sampling(max_new_tokens=60, temperature=0.0, stop_ids=tokenizer.stop_ids)
    asked = Request(id="a", tokens=(5, 6), keys=(1,), sampling=sampling, constraint=constraint)
    [done] = generate(native(policy), [asked]).values()
    tokens, state = torch.tensor((5, 6, *done.tokens)), constraint.start()
    scores = plain_logits(policy, tokens.tolist())
    for place, token in enumerate(done.tokens):
        logits = scores[1 + place].masked_fill(~state.allowed(), float("-inf"))
        assert token == int(logits.argmax())
        state.accept(token)


def test_samples_do_not_share_a_state(characters: Tokenizer):
    constraint = choice_constraint(["ab", "cd"], characters)
    one, other = constraint.start(), constraint.start()
    [a], [c] = characters.encode("a"), characters.encode("c")
    one.accept(a)
    assert bool(other.allowed()[c])
    assert not bool(one.allowed()[c])


TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": POINT}},
    {"name": "now"},
    {
        "name": "find",
        "parameters": {
            "properties": {"what": {"$ref": "#/$defs/word"}},
            "required": ["what"],
            "additionalProperties": False,
            "$defs": {"word": {"enum": ["cat", "dog"]}},
        },
    },
]


@pytest.mark.parametrize("format", ["hermes", "mistral", "llama3", "deepseek", "gpt_oss"])
def test_a_demanded_call_is_one_that_the_parser_of_the_format_reads(
    tokenizer: Tokenizer, format: str
):
    if format == "deepseek" and "Ġ" not in str(tokenizer.serialized()):
        pytest.skip("the characters of this tokenizer cannot spell the format")
    for tools, names in ((TOOLS, {"add", "find"}), (TOOLS[2:], {"find"})):
        closed = [tool for tool in tools if tool.get("name") != "now"]
        constraint = call_constraint(closed, format, tokenizer)
        found = answers(tokenizer, constraint, samples=4, new=200)
        for text, reason in found:
            assert reason == "stop", text
            turn = (parse_llama3 if format == "llama3" else tool_parsers.get(format))(text)
            assert (turn.problems, len(turn.calls)) == ((), 1)
            [call] = turn.calls
            assert call.name in names
            assert set(call.arguments) == {"add": {"x", "on"}, "find": {"what"}}[call.name]


def test_a_function_without_parameters_takes_any_object(characters: Tokenizer):
    constraint = call_constraint(TOOLS, "hermes", characters)
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert all(follow(constraint, characters.encode(text)))


BAD_SCHEMAS = [
    ({"type": "objekt"}, "schema.type"),
    ({"type": "object", "properties": {"a": {"items": {"type": 3}}}}, "schema.properties.a.items"),
    ({"properties": {"a": {"anyOf": [{}, {"not": {}}]}}}, "schema.properties.a.anyOf[1]"),
    ({"type": "array", "items": {"pattern": "("}}, "schema.items"),
    ({"$ref": "#/$defs/x", "$defs": {"y": {}}}, "schema"),
    ({"$ref": "https://example.org/schema.json"}, "schema"),
    ({"minimum": 3, "maximum": 1, "type": "integer"}, "schema"),
    ({"properties": {"a": {"enum": ["\ud800"]}}}, "schema"),
    ([], "schema"),
    ("{}", "schema"),
]


@pytest.mark.parametrize(("schema", "place"), BAD_SCHEMAS, ids=str)
def test_a_bad_schema_is_refused_with_its_place(characters: Tokenizer, schema, place: str):
    with pytest.raises(UserError) as caught:
        json_schema_constraint(schema, characters)
    assert caught.value.field.startswith(place)


def test_a_schema_that_is_nested_too_deeply_is_refused(characters: Tokenizer):
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(UserError, match="levels deep"):
        json_schema_constraint(schema, characters)


def test_other_bad_rules_are_refused(characters: Tokenizer):
    for build, why in (
        (lambda: regex_constraint("(a", characters), "unclosed group"),
        (lambda: regex_constraint("\udc80", characters), "surrogate"),
        (lambda: choice_constraint([], characters), "at least one option"),
        (lambda: choice_constraint(["a", ""], characters), "some text"),
        (lambda: choice_constraint(["\ud800"], characters), "surrogate"),
        (lambda: call_constraint(TOOLS, "glm", characters), "cannot be demanded"),
        (lambda: call_constraint([], "hermes", characters), "no function"),
        (lambda: call_constraint([{"name": 'a"b'}], "hermes", characters), "letters"),
        (lambda: call_constraint([{"function": 3}], "hermes", characters), "letters"),
        (lambda: call_constraint([{"name": "f", "parameters": 3}], "hermes", characters), "schema"),
        (
            lambda: call_constraint(
                [{"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}],
                "hermes",
                characters,
            ),
            r"tools\[0\].parameters.properties.a",
        ),
    ):
        with pytest.raises(UserError, match=why):
            build()


def test_an_answer_that_the_vocabulary_cannot_spell_is_refused_or_aborted(characters: Tokenizer):
    policy = tiny_policy("llama", vocabulary=characters.size, vocab_size=512)
    engine = native(policy)
    asked = Request(id="a", tokens=(5,), keys=(1,), sampling=Sampling(max_new_tokens=9))
    with pytest.raises(UserError, match="no token may begin"):
        engine.submit(replace(asked, constraint=choice_constraint(["é"], characters)))
    engine.submit(replace(asked, constraint=choice_constraint(["abé"], characters)))
    [done] = [done for _ in range(4) for done in engine.advance()]
    assert (characters.decode(done.tokens), done.reason) == ("ab", "aborted")


def test_the_library_is_named_where_it_is_missing(characters: Tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match="llguidance"):
        json_object_constraint(characters)


def test_a_tokenizer_whose_tokens_have_no_text_of_their_own_is_refused(tmp_path: Path):
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models

    made = Rust(models.WordPiece({"</s>": 0, "a": 1, "##b": 2, "[UNK]": 3}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no text of their own"):
        json_object_constraint(load_tokenizer(str(tmp_path)))
