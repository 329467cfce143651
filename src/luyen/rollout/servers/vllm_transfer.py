"""vLLM's own weight transfer: NCCL broadcasts to workers that know nothing of Luyen.

The server must have been started with `--weight-transfer-config '{"backend": "nccl"}'`. Both sides
make the communicator with vLLM's classes, so vLLM must be installed in the trainer's environment
too; nothing is imported before the first publication.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor

from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import HttpCall, ServerFault
from luyen.rollout.servers.process import free_port

CONFIG = {"backend": "nccl"}
"""What a server is started with."""
_LOAD_S = 1800.0
"""Most seconds for loading weights."""


@final
class TransferTransport:
    """Broadcasts the tensors one after the other, in a session of the server's transfer engine."""

    def __init__(
        self,
        connection: ServerConnection,
        *,
        workers: int,
        device: torch.device,
        address: str,
        note_version: Callable[[int], HttpCall] | None,
    ) -> None:
        """`workers` are the processes of the server that hold weights.

        `note_version` tells a server which version it has, where ending a session does not.
        """
        self._connection = connection
        self._size = workers + 1
        self._device = device
        self._address = address
        self._note_version = note_version
        self._communicator: Any = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors as this version; returns when the server has loaded them."""
        kept = {n: t.detach().to(self._device).contiguous() for n, t in tensors.items()}
        update = {
            "names": list(kept),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in kept.values()],
            "shapes": [list(t.shape) for t in kept.values()],
        }
        communicator, self._communicator = self._communicator or self._join(), None
        self._connection.call(HttpCall(path="/start_weight_update", body={}))
        body = {"update_info": update}
        reply = self._connection.start(
            HttpCall(path="/update_weights", body=body, timeout_s=_LOAD_S)
        )
        # A stream of its own: if the workers fail, its broadcasts never end.
        stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in kept.values():
            communicator.broadcast(tensor, src=0, stream=stream)
        reply.result()
        stream.synchronize()
        finish = {"weight_version": str(version)}
        self._connection.call(HttpCall(path="/finish_weight_update", body=finish))
        if self._note_version is not None:
            self._connection.call(self._note_version(version))
        self._communicator, self._stream = communicator, stream

    def reset(self) -> None:
        """Leave the group: its workers are gone."""
        self._communicator, self._stream = None, None

    def close(self) -> None:
        """Leave the group."""
        self.reset()

    def _join(self) -> Any:
        port = free_port()
        init = {
            "master_address": self._address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._size,
        }
        call = HttpCall(path="/init_weight_transfer_engine", body={"init_info": init})
        reply = self._connection.start(call)
        try:
            groups: Any = import_module("vllm.distributed.utils")
            nccl: Any = import_module("vllm.distributed.device_communicators.pynccl")
            group = groups.StatelessProcessGroup.create(
                host=self._address, port=port, rank=0, world_size=self._size
            )
            made = nccl.PyNcclCommunicator(group, device=self._device)
        except RuntimeError as error:
            reply.cancel()
            raise ServerFault("connection", f"the weight group was not made: {error}") from error
        reply.result()
        return made
