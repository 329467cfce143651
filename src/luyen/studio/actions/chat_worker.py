"""The process of one side of a chat: `python -m luyen.studio.actions.chat_worker CHECKPOINT`.

It loads the policy and answers messages as JSON lines: one line in for each message, and lines
out with its pieces, its end, or an error. It ends with its standard input, so that it outlives
no studio.
"""

import json
import os
import sys
import time
from typing import Any, TextIO

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.secrets import masked


def main(checkpoint: str, *, is_trusted: bool) -> int:
    """Answer messages until standard input ends."""
    # What libraries print must not come between the lines of the chat.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    prepare_process()
    from luyen.pipeline.policy_loading import open_checkpoint
    from luyen.studio.chat import ChatSession

    try:
        opened = open_checkpoint(checkpoint, is_trusted=is_trusted)
        session = ChatSession(opened, system=None, temperature=0.0, max_tokens=None)
    except UserError as error:
        _send(out, "error", message=masked(f"{error.why}. {error.fix}"))
        return 1
    _send(out, "ready")
    for line in sys.stdin:
        message: dict[str, Any] = json.loads(line)
        began = time.monotonic()
        try:
            session.say(
                message["message"],
                show=lambda piece: _send(out, "token", text=piece),
                temperature=message["temperature"],
                max_tokens=message["max_tokens"],
            )
        except UserError as error:
            _send(out, "error", message=f"{error.why}. {error.fix}")
            continue
        _send(out, "done", tokens=session.sampled, seconds=round(time.monotonic() - began, 3))
    return 0


def _send(out: TextIO, event: str, **data: Any) -> None:
    out.write(json.dumps({"event": event, **data}) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], is_trusted="--trust" in sys.argv[2:]))
