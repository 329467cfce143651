"""The process of a server: its socket, its signals, and what is put together in it."""

import errno
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeAlias, final

import uvicorn

from luyen.base.errors import UserError
from luyen.serve.access import Keyring, is_loopback
from luyen.serve.app import Gate, build_app
from luyen.serve.canary import CanaryLimits
from luyen.serve.canary_log import CanaryLog
from luyen.serve.canary_service import CanaryService
from luyen.serve.dispatch import ServeLimits
from luyen.serve.engine_thread import EngineThread
from luyen.serve.model import build_engine, open_model
from luyen.serve.reward_scores import open_scorer
from luyen.serve.scoring import ScoreService, is_reward_model, open_reward_model
from luyen.serve.service import Service

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


AnyService: TypeAlias = Service | ScoreService | CanaryService


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a model is loaded.

    Example:
        >>> Opening(name="tutor").overrides
        ()
    """

    name: str | None = None
    """Name in requests; None: the path."""
    overrides: tuple[str, ...] = ()
    """`key=value` over its configuration."""
    is_trusted: bool = False
    """Whether code that another user's run names may run."""


def open_service(path: str, opening: Opening, limits: ServeLimits) -> AnyService:
    """Load what lies at a path, a policy or a reward model, and start what it runs on."""
    name, overrides, is_trusted = opening.name, opening.overrides, opening.is_trusted
    if is_reward_model(path):
        judge = open_reward_model(path, name=name, overrides=overrides, is_trusted=is_trusted)
        return ScoreService(judge, limits)
    model = open_model(path, name=name, overrides=overrides, is_trusted=is_trusted)
    engine = EngineThread(model, build_engine)
    engine.start()
    return Service(engine, limits, is_trusted=is_trusted)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """The second model of a server, and how the two are compared.

    Example:
        >>> limits = CanaryLimits(share=0.1)
        >>> CanaryOptions(path="b", limits=limits, log=Path("canary.jsonl")).reward_range is None
        True
    """

    path: str
    """The candidate."""
    limits: CanaryLimits
    """When it is promoted, and when it is rolled back."""
    log: Path
    """Where scores and decisions are written."""
    reward_range: tuple[float, float] | None = None
    """Bounds of the candidate's own reward, which scores answers; None: clients vote."""


def open_canary(
    path: str, opening: Opening, limits: ServeLimits, canary: CanaryOptions
) -> CanaryService:
    """Load two policies and compare them."""
    stable = open_service(path, opening, limits)
    if not isinstance(stable, Service):
        why = "answers are compared, and a reward model gives none"
        raise UserError("--canary", canary.path, why, "serve a policy")
    named = replace(opening, name=stable.model.name)
    candidate = open_service(canary.path, named, limits)
    if not isinstance(candidate, Service):
        why = "it is a reward model, and answers are compared"
        raise UserError("--canary", canary.path, why, "name a policy")
    log = CanaryLog(
        canary.log,
        stable=stable.model.digest,
        candidate=candidate.model.digest,
        limits=canary.limits,
    )
    scorer = None
    if canary.reward_range is not None:
        loaded = candidate.model.loaded
        scorer = open_scorer(loaded.config, candidate.model.tokenizer, bounds=canary.reward_range)
    return CanaryService(stable, candidate, log, scorer=scorer)


def uvicorn_server(service: AnyService, access: Access, *, drain_s: int) -> uvicorn.Server:
    """The HTTP server; at its end it gives running requests `drain_s` seconds."""
    app = build_app(service, Gate(keys=access.keys, admin_keys=access.admin_keys))
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
    service: AnyService,
    access: Access,
    opened: socket.socket,
    *,
    drain_s: int,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 130 after Ctrl-C.

    Both signals let running requests finish. A second one ends at once.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(number)

    # uvicorn acts on signals itself, and raises them again when it is done: for these handlers.
    before = {one: signal.signal(one, note) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready()
        uvicorn_server(service, access, drain_s=drain_s).run(sockets=[opened])
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        opened.close()
    return 130 if signal.SIGINT in signals else 0
