"""Arguments against a schema: what fits, what is read from text, what the policy is told."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.rollout.tools.user_code import InvalidArguments
from luyen.rollout.tools.validate import Validator

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
        },
    },
    "required": [],
}
CHECKER = Validator("demo", SCHEMA)


def complaint(validator: Validator, arguments: dict[str, Any], **options: bool) -> str:
    with pytest.raises(InvalidArguments) as caught:
        validator.fit(arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"count": "3"}, "argument `count` must be an integer, not a string"),
        ({"count": True}, "argument `count` must be an integer, not true"),
        ({"count": 2.5}, "argument `count` must be an integer, not a number"),
        ({"unit": "K"}, 'argument `unit` must be one of "C", "F"'),
        ({"tags": ["a", 1]}, "argument `tags[1]` must be a string, not an integer"),
        ({"maybe": "x"}, "argument `maybe` must be an integer or null, not a string"),
        ({"point": {}}, "missing argument `x` of `point`"),
        ({"coutn": 3}, "unknown argument `coutn`; did you mean `count`?"),
    ],
)
def test_a_misfit_is_told_in_one_line(arguments: dict[str, Any], said: str):
    assert complaint(CHECKER, arguments) == said


def test_a_missing_argument_is_named_with_its_type():
    validator = Validator("demo", {**SCHEMA, "required": ["count", "text"]})
    assert complaint(validator, {"text": "a"}) == "missing argument `count` (an integer)"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "3", 3),
        ("count", " -12\n", -12),
        ("ratio", "0.5", 0.5),
        ("ratio", "3", 3),
        ("ratio", "1e3", 1000.0),
        ("flag", "true", True),
        ("flag", "False", False),
        ("maybe", "null", None),
        ("maybe", "7", 7),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("point", '{"x": 1}', {"x": 1}),
        ("text", "3", "3"),
        ("either", "3", "3"),
        ("unit", "C", "C"),
    ],
)
def test_a_text_is_read_where_it_can_only_mean_one_value(name: str, text: str, value: Any):
    found = CHECKER.fit({name: text}, from_text=True)[name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("count", "3.5"),
        ("count", "three"),
        ("ratio", "nan"),
        ("ratio", "1_0"),
        ("flag", "1"),
        ("tags", "a, b"),
        ("tags", "[1"),
        ("point", "[]"),
    ],
)
def test_a_text_that_leaves_doubt_is_refused(name: str, text: str):
    assert f"`{name}`" in complaint(CHECKER, {name: text}, from_text=True)


def test_a_whole_float_is_an_integer():
    found = CHECKER.fit({"count": 3.0})["count"]
    assert (found, type(found)) == (3, int)


def test_open_parameters_take_unknown_arguments_and_a_deep_one_does_not_crash():
    free = Validator("free", {"type": "object", "additionalProperties": True})
    assert free.fit({"anything": 1}) == {"anything": 1}
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    nested: dict[str, Any] = {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}
    validator = Validator("deep", {**nested, "properties": {"a": {"$ref": "#/$defs/a"}}})
    assert "nested too deeply" in complaint(validator, {"a": deep})


def test_parameters_that_are_no_schema_are_the_users_fault():
    with pytest.raises(UserError, match="no JSON schema"):
        Validator("bad", {"type": "objekt"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.sampled_from(sorted(SCHEMA["properties"])) | st.text(), JSON),
    from_text=st.booleans(),
)
def test_any_arguments_fit_or_are_refused_in_one_short_line(
    arguments: dict[str, Any], from_text: bool
):
    said, fitted = "", {}
    try:
        fitted = CHECKER.fit(arguments, from_text=from_text)
    except InvalidArguments as refused:
        said = str(refused) or "nothing"
    assert "\n" not in said
    assert said != "nothing"
    assert len(said) < 800
    if not said:
        assert fitted.keys() == arguments.keys()
        # What fits once is left alone the second time.
        assert repr(CHECKER.fit(fitted)) == repr(fitted)


def test_a_pattern_cannot_hold_up_the_conversations():
    """Python's matcher would take longer than the world lasts, on the loop that all share."""
    slow = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}
    with pytest.raises(InvalidArguments, match="does not match"):
        Validator("slow", slow).fit({"x": "a" * 50 + "!"})
    assert Validator("slow", slow).fit({"x": "aaa"}) == {"x": "aaa"}
    names = {
        "type": "object",
        "patternProperties": {"^(a+)+$": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert Validator("names", names).fit({"aa": 1, "a" * 50 + "!": "x"})["aa"] == 1
    for wrong in ({"aa": "x"}, {"b": 1}):
        with pytest.raises(InvalidArguments, match="must be"):
            Validator("names", names).fit(wrong)
    closed = {"type": "object", "additionalProperties": False, "properties": {"a": {}}}
    inside = {"type": "object", "properties": {"o": closed}}
    with pytest.raises(InvalidArguments, match="'b' is not one of its keys"):
        Validator("closed", inside).fit({"o": {"b": 1}})


def test_a_pattern_that_looks_back_is_left_to_the_tool():
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}
    assert Validator("back", schema).fit({"x": "c"}) == {"x": "c"}
