"""The process of a server: its socket, its signals, and what is put together in it."""

import errno
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import final

import uvicorn
from fastapi import FastAPI

from luyen.base.errors import UserError
from luyen.serve.access import Keyring, is_loopback

_BACKLOG = 2048
_NO_KEYS = Keyring()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where a server listens, and for whom.

    Example:
        >>> Access(host="127.0.0.1", port=8000).keys.is_empty
        True
    """

    host: str
    """Address to bind to."""
    port: int
    """Port; 0: any that is free."""
    keys: Keyring = _NO_KEYS
    """Keys of clients; empty: no key is needed."""
    admin_keys: Keyring = _NO_KEYS
    """Keys that may change the weights; empty: it cannot be done."""
    allow_anonymous: bool = False
    """Whether other machines may call without a key."""

    def refuse_exposure(self) -> None:
        """A UserError for a server that other machines could use without a key."""
        if is_loopback(self.host) or self.allow_anonymous or not self.keys.is_empty:
            return
        why = "other machines could use the model without a key"
        fix = "set LUYEN_API_KEY or --api-key-file, or say --allow-anonymous"
        raise UserError("--host", self.host, why, fix)


def open_socket(access: Access) -> socket.socket:
    """A listening socket; a UserError where the port is taken."""
    try:
        found = socket.getaddrinfo(access.host, access.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError("--host", access.host, str(error), "give an address of this host") from None
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(address)
        # From here on no other process can take the port; clients wait until the model is there.
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        is_taken = error.errno == errno.EADDRINUSE
        why = "another process listens there" if is_taken else str(error.strerror or error)
        fix = "choose another --port, or end that process" if is_taken else "choose another"
        raise UserError("--port", access.port, why, fix) from None
    opened.set_inheritable(False)
    return opened


def url_of(opened: socket.socket) -> str:
    """The address of a bound socket."""
    host, port = opened.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_server(app: FastAPI, *, drain_s: int) -> uvicorn.Server:
    """The HTTP server; at its end it gives running requests `drain_s` seconds."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=75,
        h11_max_incomplete_event_size=64 * 1024,
        http="h11",
        ws="none",
    )
    return uvicorn.Server(config)


def serve(
    app: FastAPI,
    opened: socket.socket,
    *,
    drain_s: int,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 130 after Ctrl-C.

    Both signals let running requests finish. A second one ends at once.
    """
    signals: list[int] = []
    server = uvicorn_server(app, drain_s=drain_s)

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(number)
        server.should_exit = True  # also where uvicorn does not listen to signals yet

    # uvicorn acts on signals itself, and raises them again when it is done: for these handlers.
    before = {one: signal.signal(one, note) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready()
        server.run(sockets=[opened])
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        opened.close()
    return 130 if signal.SIGINT in signals else 0
