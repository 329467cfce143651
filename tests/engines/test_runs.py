"""Runs that generate with the real vLLM: they learn, the gap is small, a killed server returns."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from luyen.rollout.servers.dialect import ServerFault
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.process import ServerProcess
from luyen.rollout.servers.weights import FolderTransport
from tests.engines.conftest import PATIENT, PYTHON
from tests.engines.run_beside import RunBeside, run_beside
from tests.engines.wide_heads import widen
from tests.runs import MODEL, ROLLOUT, Ran, train

RECIPES = Path(__file__).parents[2] / "recipes"
VLLM = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.server.python={PYTHON}",
    *(f"{ROLLOUT}.server.{name}={value}" for name, value in PATIENT.items()),
    "trainer.logger=console",
)
GAP = 1e-3


def gaps(ran: Ran) -> list[float]:
    """Largest difference of log-probabilities over all tokens of each step."""
    return ran.course("parity/max_gap")


def accuracy(ran: Ran) -> float:
    return ran.course("val/accuracy")[-1]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunBeside]:
    """The quickstart whose server nothing happens to, beside the runs of this process.

    Server and trainer take turns, so that two runs keep two cores busy.
    """
    folder = tmp_path_factory.mktemp("quickstart")
    with run_beside(folder, *VLLM, files=[RECIPES / "quickstart.yaml"]) as run:
        yield run


class Kills:
    """SIGKILL to the server and all of its processes: in a generation, and in a publication."""

    def __init__(self, *, generation: int, publication: int) -> None:
        """Versions: whose samples are being generated, and which is being published."""
        self._generation = generation
        self._publication = publication
        self._groups: list[int] = []
        self.lost_samples = 0
        """Samples that were being generated at the first kill."""
        self.faults: list[ServerFault] = []
        """Of the publication in which the server was killed."""

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        """Take the places where engines generate and publish."""
        advance, send, start = ServerEngine.advance, FolderTransport.send, ServerProcess.start

        def noted_start(server: ServerProcess) -> bool:
            is_new = start(server)
            if is_new:
                assert server.pid is not None
                self._groups.append(server.pid)
            return is_new

        def killed_advance(engine: ServerEngine) -> Any:
            found = advance(engine)
            if engine._version == self._generation and engine._running and not self.lost_samples:
                self.lost_samples = len(engine._running)
                self._kill()
            return found

        def killed_send(
            transport: FolderTransport, version: int, tensors: Mapping[str, Tensor]
        ) -> None:
            if version != self._publication or self.faults:
                return send(transport, version, tensors)
            killer = threading.Timer(0.1, self._kill)
            killer.start()
            try:
                return send(transport, version, tensors)
            except ServerFault as fault:
                self.faults.append(fault)
                raise
            finally:
                killer.join()

        patched.setattr(ServerProcess, "start", noted_start)
        patched.setattr(ServerEngine, "advance", killed_advance)
        patched.setattr(FolderTransport, "send", killed_send)

    def _kill(self) -> None:
        os.killpg(self._groups[-1], signal.SIGKILL)


def test_a_run_whose_server_is_killed_learns_as_much(
    quickstart: RunBeside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kills = Kills(generation=20, publication=50)
    kills.patch(monkeypatch)
    ran = train(tmp_path, *VLLM, files=[RECIPES / "quickstart.yaml"])
    assert kills.lost_samples > 0
    assert kills.faults[0].kind == "connection"
    assert len(gaps(ran)) == 115
    assert max(gaps(ran)) < GAP
    assert abs(accuracy(ran) - accuracy(quickstart.ran)) <= 0.03


def test_the_quickstart_learns(quickstart: RunBeside):
    ran = quickstart.ran
    assert ran.course("val/accuracy")[0] < 0.5
    assert accuracy(ran) >= 0.9
    assert len(gaps(ran)) == 115
    assert max(gaps(ran)) < GAP


def test_the_tool_recipe_learns_at_another_temperature(tmp_path: Path):
    words = (
        f"{MODEL}.path={widen(tmp_path / 'model')}",
        f"{ROLLOUT}.temperature=0.7",
        f"{ROLLOUT}.server.transport=group",
    )
    ran = train(tmp_path, *VLLM, *words, files=[RECIPES / "tool_calling.yaml"])
    assert accuracy(ran) >= 0.9
    assert len(gaps(ran)) == 30
    assert max(gaps(ran)) < GAP
