"""What must not be read is found in texts, names, addresses, command lines and errors."""

import pickle
from collections.abc import Iterator

import pytest

from luyen.base.boundary import last_line
from luyen.base.errors import UserError
from luyen.base.records import CallStatus, Score, ToolCall
from luyen.base.secrets import (
    forget,
    has_masked_url,
    is_secret_name,
    masked,
    masked_tree,
    masked_words,
    remember,
)

SECRET = 'k9/"x\\y ü-planted'


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/v1", "https://***@host/v1"),
        ("https://token@host", "https://***@host"),
        ("postgres://a:b@c@host/x", "postgres://***@host/x"),
        ("see https://a/?x=1&api_key=abc#top", "see https://a/?x=1&api_key=***#top"),
        ("'http://a?access_token=abc'", "'http://a?access_token=***'"),
        ("http://a/?X-Amz-Signature=1&sig=abc", "http://a/?X-Amz-Signature=***&sig=***"),
        ("GET /v1?hf_token=abc HTTP/1.1", "GET /v1?hf_token=*** HTTP/1.1"),
        ("http://a:80/b@c and me@example.org", "http://a:80/b@c and me@example.org"),
        ("arithmetic://sum?digits=1&size=32", "arithmetic://sum?digits=1&size=32"),
    ],
)
def test_passwords_and_keys_of_addresses_are_masked(text: str, expected: str):
    assert masked(text) == expected
    assert masked(expected) == expected
    assert has_masked_url(expected) == (text != expected)


def test_a_value_is_masked_in_every_spelling_that_a_message_gives_it():
    remember(SECRET, "${oc.env:K}")
    quoted = "k9%2F%22x%5Cy%20%C3%BC-planted"
    for text in (
        SECRET,
        repr({"a": SECRET}),
        f"at http://h/{quoted}?a",
        UserError("a", 1, SECRET, "b").why,
    ):
        assert "planted" not in masked(text)
        assert "${oc.env:K}" in masked(text)


def test_short_words_and_paths_stay_readable():
    for value in ("none", "/data/models", "~/models", "./rows"):
        remember(value)
        assert masked(f"at {value}") == f"at {value}"


@pytest.mark.parametrize(
    "name", ["api_key", "OPENAI_API_KEY", "a.b.password", "hf_token", "secret", "Authorization"]
)
def test_names_say_what_is_secret(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "api_key_env", "eos_token", "json_key", "tokenizer_path", "key", ""]
)
def test_names_that_only_look_like_it(name: str):
    assert not is_secret_name(name)


def test_a_command_line_is_kept_without_its_secrets():
    words = ["luyen", "train", "a.kwargs={api_key: sk-planted, n: 2}", "b.password=planted"]
    words += ["c.max_tokens=8", "d.token=${oc.env:T}", "e.url=http://u:planted@h"]
    found = masked_words(words)
    assert "planted" not in " ".join(found)
    assert found[4:6] == words[4:6]
    assert "n: 2" in found[2]


def test_of_environments_and_headers_nothing_is_shown():
    server = {"command": ["x"], "env": {"A": "planted"}, "headers": {"X-Any": "Bearer planted"}}
    assert masked_tree(server) == {
        "command": ["x"], "env": {"A": "***"}, "headers": {"X-Any": "***"},
    }  # fmt: skip
    assert "planted" not in str(UserError("mcp", server, "it did not start", "look"))


def test_errors_faults_and_scores_hold_no_secret_in_whatever_process_they_are_made():
    remember("planted-value")
    error = UserError("reward.kwargs.api_key", "sk-any", "planted-value", "planted-value")
    made = pickle.loads(pickle.dumps(error))
    assert "planted" not in str(made)
    assert "sk-any" not in str(made)
    assert "sk-any" not in repr(made)
    assert "planted" not in last_line(ValueError("no planted-value"))
    assert Score(name="a", value=None, error="planted-value").error == "***"
    call = ToolCall(turn=0, name="a", status=CallStatus.FAILED, result="", error="planted-value")
    assert call.error == "***"


@pytest.mark.parametrize("name", ["accessToken", "clientSecret", "db.userPwd", "bearer", "cookies"])
def test_names_of_other_habits_are_secret_too(name: str):
    assert is_secret_name(name)
    assert masked_tree({name: "hidden-value"}) == {name: "***"}
    assert masked_words([f"a.{name}=hidden-value"]) == [f"a.{name}=***"]


def test_what_follows_a_fragment_is_masked():
    assert masked("https://host/#access_token=hidden") == "https://host/#access_token=***"
