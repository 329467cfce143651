"""Renders chat templates as transformers does; run as a script by `chat_template`.

It reads requests from standard input and writes replies to standard output, each with its length
before it. It imports nothing of Luyen, starts within 0.1 s, and ends when its input does.
"""

import json
import marshal
import struct
import sys
import time
from datetime import datetime
from typing import Any, BinaryIO, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows: no limits, and the clock of the caller
    resource = None

LENGTH = struct.Struct("<Q")
"""How the length of a request or a reply is written."""
TEXT, REFUSED = b"t", b"r"
"""First byte of a reply: the rendered text, or why there is none."""
_WORDS = 500
"""Most characters of a reason."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says; the text is that of its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        """The body between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        called = self.call_method("_body")
        return nodes.CallBlock(called, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that jinja's own filter makes."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def make_environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to a chat template, and nothing more."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    filters = cast(dict[str, Any], made.filters)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"] = _tojson
    given = cast(dict[str, Any], made.globals)  # pyright: ignore[reportUnknownMemberType]
    given |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return made


def reply(request: bytes, compiled: dict[str, jinja2.Template], *, characters: int) -> bytes:
    """The text of a template, or why it has none; `compiled` keeps templates by their source."""
    source, variables = marshal.loads(request)
    try:
        if source not in compiled:
            compiled[source] = make_environment().from_string(source)
        text = compiled[source].render(**variables)
        most = characters if len(request) < characters else 2 * len(request)
        if len(text) > most:
            why = f"it writes {len(text):,} characters, and {most:,} are allowed"
            return REFUSED + why.encode()
        return TEXT + text.encode()
    except UnicodeEncodeError:
        return REFUSED + b"it writes half of a surrogate pair, which no tokenizer takes"
    except Exception as error:  # noqa: BLE001 - whatever a stranger's program raises
        return REFUSED + _reason(error).encode("utf-8", "replace")


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, MemoryError):
        return "it needs more memory than a template may take"
    if isinstance(error, jinja2.TemplateSyntaxError):
        said = f"it does not parse: line {error.lineno}: {error.message}"
    elif type(error) is jinja2.TemplateError:
        said = str(error)  # what the template itself says with raise_exception
    else:
        said = f"{kind}: {error}"
    return said if len(said) <= _WORDS else f"{said[:_WORDS]}..."


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _limit(cpu_s: int) -> None:
    """So many seconds of the processor from now on; the kernel ends the process after them."""
    if resource is None:
        return
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + cpu_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (_within(soft, most), most))


def _within(wanted: int, most: int) -> int:
    """A limit that the process may set where it was started under a lower one."""
    assert resource is not None
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)


def main(memory: int, cpu_s: int, characters: int) -> None:
    """Answer until the input ends."""
    if resource is not None:
        space = _within(memory, resource.getrlimit(resource.RLIMIT_AS)[1])
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    compiled: dict[str, jinja2.Template] = {}
    while (request := _read(sys.stdin.buffer)) is not None:
        _limit(cpu_s)
        said = reply(request, compiled, characters=characters)
        sys.stdout.buffer.write(LENGTH.pack(len(said)) + said)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
