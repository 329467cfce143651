"""How weights reach a server: files of a folder, or a process group with its workers.

A transport sends the tensors of a whole checkpoint, under the names of Hugging Face's layout. It
proves nothing: `luyen.rollout.servers.proof` asks the server what it holds afterwards.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.models.trained_weights import tensor_digests
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import ServerDialect, ServerFault, TensorForm, WeightGroup
from luyen.rollout.servers.process import free_port
from luyen.rollout.servers.vllm_worker import broadcast, make_group

_FIELD = "actor_rollout_ref.rollout.server.transport"


class WeightTransport(Protocol):
    """Sends weights to one server."""

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors as this version; returns when the server has loaded them.

        A ServerFault if it could not; sending again, also to a restarted server, is allowed.
        """
        ...

    def reset(self) -> None:
        """The server was started anew: connections to the former one are void."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


@final
class FolderTransport:
    """A safetensors file in a folder that the server can read."""

    def __init__(
        self, connection: ServerConnection, dialect: ServerDialect, *, model: Path, folder: Path
    ) -> None:
        """`model` has config and tokenizer, if the server was started here.

        Versions are written below `folder`.
        """
        self._connection = connection
        self._dialect = dialect
        self._model = model
        self._folder = folder
        if not dialect.load_folder(folder, 0):
            why = f"`{dialect.name}` does not load weights from a folder"
            raise UserError(_FIELD, "folder", why, "choose another transport")

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors and let the server load them."""
        folder, text = self._folder / f"version-{version}", hash_value(tensor_digests(tensors))
        complete = folder / "complete"
        if not complete.is_file() or complete.read_text() != text:
            self._write(folder, tensors)
            complete.write_text(text)
        for call in self._dialect.load_folder(folder.absolute(), version):
            self._connection.call(call)
        self._drop_old(folder)

    def reset(self) -> None:
        """The files stay."""

    def close(self) -> None:
        """Remove every version."""
        for folder in self._versions():
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in self._model.iterdir() if self._model.is_dir() else ():
            if file.is_file() and not file.name.endswith((".safetensors", ".index.json")):
                shutil.copyfile(file, folder / file.name)
        plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})

    def _drop_old(self, newest: Path) -> None:
        for folder in self._versions():
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)

    def _versions(self) -> list[Path]:
        return sorted(self._folder.glob("version-*"))


@final
class GroupTransport:
    """Broadcasts of a process group: gloo between CPUs, NCCL between GPUs.

    The group is made of a store and a backend alone, so that it stands beside any other group of
    this process.
    """

    def __init__(
        self,
        connection: ServerConnection,
        dialect: ServerDialect,
        *,
        workers: int,
        backend: Literal["gloo", "nccl"],
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        device: torch.device | None = None,
    ) -> None:
        """`workers` are the processes of the server that hold weights."""
        self._connection = connection
        self._dialect = dialect
        self._size = workers + 1
        self._backend: Literal["gloo", "nccl"] = backend
        self._address = address
        self._timeout_s = timeout_s
        self._device = device or torch.device("cpu")
        self._group: Any = None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast the tensors one after the other."""
        forms = [
            TensorForm(name=n, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
            for n, t in tensors.items()
        ]
        group, self._group = self._group or self._join(), None
        reply = self._connection.start(self._dialect.receive(forms, version))
        try:
            for tensor in tensors.values():
                broadcast(group, tensor.detach().to(self._device).contiguous())
        except RuntimeError as error:  # what torch raises when a rank is gone
            reply.cancel()
            raise ServerFault("connection", f"the weight group broke: {error}") from error
        reply.result()
        self._group = group

    def reset(self) -> None:
        """Leave the group: its workers are gone."""
        self._group = None

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def _join(self) -> Any:
        group = WeightGroup(
            address=self._address,
            port=free_port(),
            size=self._size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        call = self._dialect.join_group(group)
        if call is None:
            why = f"`{self._dialect.name}` cannot join a process group here"
            raise UserError(_FIELD, "group", why, "set it to folder")
        reply = self._connection.start(call)
        try:
            made = make_group(
                group.address,
                group.port,
                0,
                group.size,
                group.backend,
                group.timeout_s,
                self._dialect.group_prefixes(group.backend),
            )
        except RuntimeError as error:
            reply.cancel()
            raise ServerFault("connection", f"the weight group was not made: {error}") from error
        reply.result()
        return made
