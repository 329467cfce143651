"""Chats with the tools of a run, and with a served model."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, ToolCall
from luyen.pipeline.policy_loading import open_checkpoint
from luyen.studio.chat import ChatSession, ChatTools
from luyen.studio.evaluation.endpoint import ChatEndpoint, EndpointOptions
from tests.runs import CHATTY

MODEL = "builtin://arithmetic"


def test_calls_of_tools_are_made_and_answered_until_the_policy_calls_no_more():
    words = (*CHATTY, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3")
    opened = open_checkpoint(MODEL, words)
    block = opened.config.actor_rollout_ref.rollout.multi_turn
    calls: list[ToolCall] = []
    with closing(ChatTools(block)) as tools:
        for question in ("1+2=", "3+4=", "5+6=", "7+8="):
            before = len(calls)
            talk = ChatSession(opened, system=None, temperature=3.0, max_tokens=4, tools=tools)
            talk.say(question, called=calls.append)
            roles = [message["role"] for message in talk.messages]
            assert roles[0] == "user"
            assert roles[-1] == "assistant"
            assert 1 <= roles.count("assistant") <= 3
            named = [call for call in calls[before:] if call.name == "echo"]
            assert roles.count("tool") == len(named)
            assert talk.sampled <= 4 * roles.count("assistant")
            assert set(talk.tokens) >= set(opened.tokenizer.encode(question))
    made = [call for call in calls if call.name == "echo" and call.has_run]
    assert made
    # the tool says the first six characters backwards; a second call of a turn is refused
    answered = [call for call in made if call.status == CallStatus.OK]
    assert answered
    assert all(call.result == call.arguments["text"][:6][::-1] for call in answered)


def test_a_run_without_tools_has_none_in_a_chat():
    opened = open_checkpoint(MODEL)
    with pytest.raises(UserError, match="no tools"):
        ChatTools(opened.config.actor_rollout_ref.rollout.multi_turn)


Write = Callable[[str], None]


@contextmanager
def server(answer: Callable[[dict[str, Any], Write], None]) -> Iterator[str]:
    """A chat server at an address of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

            def write(text: str) -> None:
                self.wfile.write(text.encode())
                self.wfile.flush()

            answer(body, write)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}/v1"
        found.shutdown()
        thread.join()


def event(**delta: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\r\n\r\n"


def test_pieces_of_a_served_answer_are_shown_before_its_end():
    seen: list[str] = []
    first = threading.Event()

    def answer(body: dict[str, Any], write: Write) -> None:
        assert (body["model"], body["stream"], body["max_tokens"]) == ("m", True, 9)
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        text = event(role="assistant") + event(content="né")
        write(text[:-7])  # cut within an event
        write(text[-7:])
        assert first.wait(10)
        write(event(content="!") + 'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n')
        write("data: [DONE]\n\n")

    def show(piece: str) -> None:
        seen.append(piece)
        first.set()

    with server(answer) as url:
        talk = ChatEndpoint.connect(EndpointOptions(url=url))
        messages = [{"role": "user", "content": "hi"}]
        found = talk.answer(messages, temperature=0.0, max_tokens=9, show=show)
    assert found == ("né!", 7)
    assert seen == ["né", "!"]


@pytest.mark.parametrize("text", ["", "<html>", 'data: {"choices": []}\n\n', event(content="a")])
def test_an_answer_that_breaks_off_is_an_error(text: str):
    with server(lambda _, write: write(text)) as url:
        talk = ChatEndpoint.connect(EndpointOptions(url=url))
        with pytest.raises(UserError, match="no stream of an answer"):
            talk.answer([], temperature=0.0, max_tokens=1, show=lambda _: None)
