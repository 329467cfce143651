"""From a dialect and a configuration to an engine over a server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.files import writing
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.export import (
    adapter_tensors,
    checkpoint_tensors,
    export_for_server,
    save_adapter_config,
)
from luyen.models.policy import Policy
from luyen.rollout.native.sequences import Decode
from luyen.rollout.servers.adapter import AdapterTransport, sends_adapter
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import ServerDialect
from luyen.rollout.servers.engine import ServerEngine, ServerLimits
from luyen.rollout.servers.process import AttachedServer, Server, ServerProcess, local_address
from luyen.rollout.servers.weights import (
    FolderTransport,
    GroupTransport,
    IpcTransport,
    WeightTransport,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Where the files of a server are.

    Example:
        >>> place = ServerPlace(source="builtin://arithmetic", folder=Path("run/servers/0"))
        >>> place.model.name, place.log.name
        ('model', 'server.log')
    """

    source: str
    """Model directory or hub id that tokenizer files come from."""
    folder: Path
    """Folder of this server alone: its model, its log, versions of its weights."""
    index: int = 0
    """Number of the copy of the engine: which of `server_urls` is its own."""

    @property
    def model(self) -> Path:
        """The model that the server is started with."""
        return self.folder / "model"

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self.folder / "server.log"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """How a server is started.

    Example:
        >>> launch = ServerLaunch(command=lambda port: ["serve", str(port)], environment=dict)
        >>> launch.command(80)
        ['serve', '80']
    """

    command: Callable[[int], Sequence[str]]
    """The command by port."""
    environment: Callable[[], Mapping[str, str]]
    """Variables besides those of this process; makes the files that they name."""


def build_server_engine(
    dialect: ServerDialect,
    *,
    launch: ServerLaunch | None,
    policy: Policy,
    rollout: RolloutConfig,
    max_model_len: int,
    decode: Decode | None,
    place: ServerPlace,
    make_transport: Callable[[Server, ServerConnection], WeightTransport] | None = None,
) -> ServerEngine:
    """An engine over a server that `launch` starts, or over one of `rollout.server_urls`.

    A server is started when the first request or publication needs it. `make_transport` gives a
    transport that servers of this kind alone have.
    """

    def is_ready() -> bool:
        return connection.is_ready(dialect.health())

    server = _make_server(launch, policy, rollout, place, is_ready)
    connection = ServerConnection(lambda: server.url, timeout_s=rollout.server.request_timeout_s)
    if make_transport is None:
        transport = _transport(server, connection, dialect, policy, rollout, place)
    else:
        transport = make_transport(server, connection)
    return ServerEngine(
        server,
        connection,
        dialect,
        transport,
        policy=policy,
        decode=decode,
        limits=ServerLimits(
            max_model_len=max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            retries=rollout.server.retries,
        ),
        has_own_weights=transport is None,
        tensors=adapter_tensors if sends_adapter(policy, rollout) else checkpoint_tensors,
    )


def _make_server(
    launch: ServerLaunch | None,
    policy: Policy,
    rollout: RolloutConfig,
    place: ServerPlace,
    is_ready: Callable[[], bool],
) -> Server:
    urls = rollout.server_urls
    if urls:
        return AttachedServer(urls[place.index % len(urls)])
    if launch is None:
        why = f"`{rollout.name}` is a server that runs already"
        fix = "give its address, such as [http://127.0.0.1:8080]"
        raise UserError("actor_rollout_ref.rollout.server_urls", [], why, fix)
    made: ServerLaunch = launch

    def prepare() -> Mapping[str, str]:
        tensors = checkpoint_tensors(policy, merges=not sends_adapter(policy, rollout))
        with writing(place.folder):
            export_for_server(policy, place.source, place.model, tensors=tensors)
            return made.environment()

    return ServerProcess(
        launch.command,
        prepare=prepare,
        log=place.log,
        is_ready=is_ready,
        start_timeout_s=rollout.server.start_timeout_s,
    )


def _transport(
    server: Server,
    connection: ServerConnection,
    dialect: ServerDialect,
    policy: Policy,
    rollout: RolloutConfig,
    place: ServerPlace,
) -> WeightTransport | None:
    if not dialect.load_folder(place.folder, 0):
        return None
    if sends_adapter(policy, rollout):
        return AdapterTransport(
            connection,
            dialect,
            folder=place.folder / "adapters",
            save_config=lambda folder: save_adapter_config(policy, place.source, folder),
        )
    if rollout.server.transport == "folder":
        return FolderTransport(
            connection, dialect, model=place.model, folder=place.folder / "weights"
        )
    if rollout.server.transport == "ipc":
        return IpcTransport(connection, dialect, device=policy.device)
    is_gpu = policy.device.type == "cuda"
    return GroupTransport(
        connection,
        dialect,
        workers=rollout.tensor_model_parallel_size,
        backend="nccl" if is_gpu else "gloo",
        address=local_address(server.url),
        device=policy.device,
    )
