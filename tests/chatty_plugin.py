"""A format in which even random weights call tools: turns end often, and every other one calls."""

from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall, tool_parsers


@tool_parsers.register(
    "chatty",
    stop_tokens=(
        "<reserved_0>", "<reserved_1>", "<reserved_2>", "<reserved_3>", "<reserved_4>",
        "<reserved_5>", "<reserved_6>", "<reserved_7>", "<reserved_8>", "<reserved_9>",
        "<reserved_10>", "<reserved_11>", "<reserved_12>", "<reserved_13>", "<reserved_14>",
    ),
    values="json",
)  # fmt: skip
def chatty(text: str) -> ParsedTurn:
    """Texts of some lengths call `echo`, once or twice, one length cannot be read."""
    kind = sum(map(ord, text)) % 5
    call = WrittenCall(name="echo", arguments={"text": text})
    if kind == 0:
        return ParsedTurn(content=text, calls=(), problems=("nobody can read this",))
    if kind == 1:
        return ParsedTurn(content=text, calls=())
    return ParsedTurn(content=text, calls=(call,) * (1 + kind % 2))
