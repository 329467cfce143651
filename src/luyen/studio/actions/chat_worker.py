"""The process of one side of a chat: `python -m luyen.studio.actions.chat_worker CHECKPOINT`.

It loads the policy, or with `--url` asks a served model, and answers messages as JSON lines: one
line in for each message, and lines out with its pieces, its calls of tools, its end, or an error.
It ends with its standard input, so that it outlives no studio.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any, TextIO, TypeAlias

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.records import ToolCall
from luyen.base.secrets import masked

Say: TypeAlias = Callable[[dict[str, Any]], int]
"""Answers a message and returns the tokens of the answer; its pieces are sent as they come."""


def main(words: Sequence[str]) -> int:
    """Answer messages until standard input ends."""
    given = _arguments(words)
    # What libraries print must not come between the lines of the chat.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    prepare_process()
    try:
        if given.url is not None:
            return _answer_all(out, _endpoint(given, out))
        from luyen.pipeline.policy_loading import open_checkpoint
        from luyen.studio.chat import ChatTools

        opened = open_checkpoint(given.checkpoint, is_trusted=given.trust)
        block = opened.config.actor_rollout_ref.rollout.multi_turn
        with closing(ChatTools(block)) if given.tools else nullcontext() as tools:
            return _answer_all(out, _policy(opened, tools, out))
    except UserError as error:
        _send(out, "error", message=masked(f"{error.why}. {error.fix}"))
        return 1


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--url")
    parser.add_argument("--model")
    parser.add_argument("--api-key-env")
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--trust", action="store_true")
    return parser.parse_args(words)


def _policy(opened: Any, tools: Any, out: TextIO) -> Say:
    """Answers of a loaded policy, which may call tools."""
    from luyen.studio.chat import ChatSession

    session = ChatSession(opened, system=None, temperature=0.0, max_tokens=None, tools=tools)

    def called(call: ToolCall) -> None:
        shown = {"name": call.name, "arguments": dict(call.arguments), "result": call.result}
        _send(out, "tool", **shown, status=call.status.value, seconds=call.seconds)

    def say(message: dict[str, Any]) -> int:
        session.say(
            message["message"],
            show=lambda piece: _send(out, "token", text=piece),
            called=called,
            temperature=message["temperature"],
            max_tokens=message["max_tokens"],
        )
        return session.sampled

    return say


def _endpoint(given: argparse.Namespace, out: TextIO) -> Say:
    """Answers of a served model; the server gets the whole conversation each time."""
    from luyen.studio.evaluation.endpoint import ChatEndpoint, EndpointOptions

    options = EndpointOptions(url=given.url, model=given.model, api_key_env=given.api_key_env)
    endpoint = ChatEndpoint.connect(options)
    messages: list[dict[str, Any]] = []

    def say(message: dict[str, Any]) -> int:
        conversation = [*messages, {"role": "user", "content": message["message"]}]
        text, count = endpoint.answer(
            conversation,
            temperature=message["temperature"],
            max_tokens=message["max_tokens"],
            show=lambda piece: _send(out, "token", text=piece),
        )
        messages[:] = [*conversation, {"role": "assistant", "content": text}]
        return count

    return say


def _answer_all(out: TextIO, say: Say) -> int:
    _send(out, "ready")
    for line in sys.stdin:
        message: dict[str, Any] = json.loads(line)
        began = time.monotonic()
        try:
            count = say(message)
        except UserError as error:
            _send(out, "error", message=masked(f"{error.why}. {error.fix}"))
            continue
        _send(out, "done", tokens=count, seconds=round(time.monotonic() - began, 3))
    return 0


def _send(out: TextIO, event: str, **data: Any) -> None:
    out.write(json.dumps({"event": event, **data}, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
