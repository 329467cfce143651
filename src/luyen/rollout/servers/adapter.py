"""A LoRA adapter for a server: saved as a folder and loaded by its path, without the weights below.

Every publication gets a name of its own, which requests then ask for. A server that lacks it
refuses them, so that no request is answered by another version.
"""

import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.files import writing
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.export import save_adapter
from luyen.models.lora import adapter_rank
from luyen.models.policy import Policy
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import ServerDialect, ServerFault

_FIELD = "actor_rollout_ref.rollout.server.lora_format"


def sends_adapter(policy: Policy, rollout: RolloutConfig) -> bool:
    """Whether a server gets the policy's adapter alone."""
    return rollout.server.lora_format == "adapter" and adapter_rank(policy.model) > 0


@final
class AdapterTransport:
    """Saves the adapter in a folder that the server can read, and lets the server load it."""

    def __init__(
        self,
        connection: ServerConnection,
        dialect: ServerDialect,
        *,
        folder: Path,
        save_config: Callable[[Path], None],
    ) -> None:
        """Adapters are written below `folder`; `save_config` adds their configuration."""
        self._connection = connection
        self._dialect = dialect
        self._folder = folder
        self._save_config = save_config
        self._loaded: list[str] = []
        """Adapters that the server may have, by name."""
        if dialect.load_adapter("", folder) is None:
            why = f"`{dialect.name}` loads no adapter"
            raise UserError(_FIELD, "adapter", why, "set it to merged")

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Let the server load the adapter, and drop earlier ones; the name to request it by."""
        # A name is never used twice: a load whose reply was lost may have succeeded.
        name = f"version-{version}-{secrets.token_hex(4)}"
        folder = self._folder / name
        with writing(folder):
            folder.mkdir(parents=True)
            save_adapter(folder, tensors)
            self._save_config(folder)
        earlier, self._loaded = self._loaded, [*self._loaded, name]
        call = self._dialect.load_adapter(name, folder.absolute())
        assert call is not None, "the dialect loads adapters"
        self._connection.call(call)
        self._unload(earlier)
        self._loaded = [name]
        return name

    def reset(self) -> None:
        """A new server has none."""
        self._loaded = []

    def close(self) -> None:
        """Unload the adapter where the server is still there, and remove all folders."""
        self._unload(self._loaded)
        self._loaded = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _unload(self, names: list[str]) -> None:
        """A server that does not know a name, or is gone, needs nothing."""
        for name in names:
            call = self._dialect.unload_adapter(name)
            with suppress(ServerFault):
                if call is not None:
                    self._connection.call(call)
            shutil.rmtree(self._folder / name, ignore_errors=True)
