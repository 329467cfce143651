"""vLLM's own weight transfer, without a GPU: what a fault leaves behind is not used again."""

from typing import Any

import pytest
import torch

from luyen.rollout.servers import weights
from luyen.rollout.servers.dialect import HttpCall, ServerFault
from luyen.rollout.servers.weights import TransferTransport


class Stream:
    """Stands for a stream of the device."""

    def __init__(self, *_: Any) -> None:
        """On any device."""

    def wait_stream(self, other: Any) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """Nothing runs."""


class Communicator:
    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def broadcast(self, tensor: torch.Tensor, *, src: int, stream: Stream) -> None:
        assert src == 0
        self.streams.append(stream)


class Connection:
    """Answers every call; those to paths in `broken` by a fault."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.broken: set[str] = set()

    def call(self, call: HttpCall) -> Any:
        self.paths.append(call.path)
        if call.path in self.broken:
            raise ServerFault("reply", "500")

    def start(self, call: HttpCall) -> Any:
        connection = self

        class Reply:
            def result(self) -> Any:
                return connection.call(call)

            def cancel(self) -> None:
                """Nothing runs."""

        return Reply()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    """Communicators that were made."""
    found: list[Communicator] = []

    def make(*_: Any) -> Communicator:
        found.append(Communicator())
        return found[-1]

    monkeypatch.setattr(weights, "make_communicator", make)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return found


def test_after_a_fault_neither_group_nor_stream_is_used_again(made: list[Communicator]):
    connection: Any = Connection()
    transport = TransferTransport(
        connection,
        workers=1,
        device=torch.device("cpu"),
        address="127.0.0.1",
        note_version=lambda n: HttpCall(path=f"/note/{n}", body={}),
    )
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    transport.send(1, tensors)
    transport.send(2, tensors)
    assert len(made) == 1
    assert len(made[0].streams) == 4
    assert len(set(made[0].streams)) == 1
    assert connection.paths[-1] == "/note/2"
    connection.broken.add("/update_weights")
    with pytest.raises(ServerFault):
        transport.send(3, tensors)
    connection.broken.clear()
    transport.send(3, tensors)
    # Broadcasts of the fault never end: what is behind them on a stream would never begin.
    assert len(made) == 2
    assert not set(made[0].streams) & set(made[1].streams)
    assert connection.paths[-1] == "/note/3"
