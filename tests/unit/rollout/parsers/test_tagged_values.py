"""The formats whose arguments are tags around plain text."""

import pytest

from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.parsers.tag_formats import parse_glm, parse_qwen3_coder


def qwen(inner: str) -> str:
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


GOOD_QWEN = qwen("<parameter=x>\n1\n</parameter>\n")
GOOD_GLM = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
GOOD = (WrittenCall(name="f", arguments={"x": "1"}),)


def test_a_value_keeps_everything_but_the_line_breaks_of_its_tags():
    code = "\ndef f():\n    return {'a': 1}\n\n"
    text = qwen(f"<parameter=code>\n{code}\n</parameter>\n<parameter=n>07</parameter>\n")
    assert parse_qwen3_coder(text).calls[0].arguments == {"code": code, "n": "07"}


def test_values_stay_as_they_were_written():
    for value in ("1.50", "null", "true", '{"a":  1}', "[1]", '"x"', "", " ", "\n"):
        argument = f"<arg_key>x</arg_key><arg_value>{value}</arg_value>"
        parsed = parse_glm(f"<tool_call>f{argument}</tool_call>")
        assert parsed.calls[0].arguments == {"x": value}
        parsed = parse_qwen3_coder(qwen(f"<parameter=x>\n{value}\n</parameter>\n"))
        assert parsed.calls[0].arguments == {"x": value}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', "<function=NAME> must follow <tool_call>"),
        ("<tool_call><function=></function></tool_call>", "<function=NAME> must follow"),
        ("<function=f>\n</function>\n</tool_call>", "must stand inside of <tool_call>"),
        (qwen("<parameter=x>\n1\n"), 'the value of "x" in the call of "f" is not closed'),
        (qwen("<parameter=x>\n1\n<parameter=y>2</parameter>"), 'value of "x" in the call of "f"'),
        (qwen("<parameter=>1</parameter>"), 'an argument has no name in the call of "f"'),
        (
            qwen("<parameter=x>1</parameter><parameter=x>2</parameter>"),
            '"x" stands twice in the call of "f"',
        ),
        (qwen("<parameter=x>1</parameter>2</parameter>"), 'not "2</parameter>'),
        (qwen("x=1\n"), "must go on with <parameter=KEY> or </function></tool_call>"),
        ("<tool_call><function=f></tool_call>", 'not "</tool_call>'),
        ("</tool_call>", "</tool_call> has no <tool_call> before it"),
    ],
)
def test_a_bad_call_of_qwen_is_one_problem_and_spares_its_sibling(bad: str, why: str):
    parsed = parse_qwen3_coder(f"{bad}\n{GOOD_QWEN}")
    assert parsed.calls == GOOD
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
    assert parsed.content == bad


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "one name must follow"),
        ("<tool_call></tool_call>", "one name must follow <tool_call>"),
        ("<tool_call>two words</tool_call>", "one name must follow <tool_call>"),
        ("<tool_call>f\n<arg_key>x</arg_key></tool_call>", "must go on with <arg_key>KEY"),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>1</tool_call>", 'value of "x" in the call'),
        (
            "<tool_call>f<arg_key>x</arg_key><arg_value>1"
            "<arg_key>y</arg_key><arg_value>2</arg_value></tool_call>",
            'the value of "x" in the call of "f" is not closed',
        ),
        (
            "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>"
            "<arg_key>x</arg_key><arg_value>2</arg_value></tool_call>",
            '"x" stands twice',
        ),
        ("<tool_call>f<arg_key> </arg_key><arg_value>1</arg_value></tool_call>", "has no name"),
        ("</tool_call>", "</tool_call> has no <tool_call> before it"),
    ],
)
def test_a_bad_call_of_glm_is_one_problem_and_spares_its_sibling(bad: str, why: str):
    parsed = parse_glm(f"{bad}\n{GOOD_GLM}")
    assert parsed.calls == GOOD
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
    assert parsed.content == bad
