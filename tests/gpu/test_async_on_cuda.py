"""One process on a GPU generates while it trains: two streams, and the numbers of one order."""

from pathlib import Path

import pytest
import torch

from luyen.base.digests import read_digests
from luyen.models.device_lock import CALLS
from luyen.runtime.generation import DeviceStream
from tests.runs import CHATTY, Ran, train

pytestmark = pytest.mark.gpu

AHEAD = (
    "trainer.device=cuda",
    "trainer.total_training_steps=4",
    "trainer.max_staleness=1",
    "algorithm.rollout_correction.rollout_is=token",
)
KINDS = {
    "answers": (),
    "fp32": ("actor_rollout_ref.model.dtype=float32",),
    "conversations": CHATTY,
    "adapters": ("actor_rollout_ref.model.lora_rank=4",),
    "top-p": ("actor_rollout_ref.rollout.top_p=0.9",),
}


@pytest.fixture
def cuda(device: str) -> str:
    """CUDA, or no test."""
    if device != "cuda":
        pytest.skip("needs CUDA")
    return device


def run(folder: Path, *words: str) -> Ran:
    return train(folder, *AHEAD, *words)


def chain(ran: Ran) -> list[str]:
    return [digest.chain for digest in read_digests(ran.root / "digests.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_a_step_ahead_repeats(cuda: str, kind: str, tmp_path: Path):
    first, again = (run(tmp_path / name, *KINDS[kind]) for name in ("first", "again"))
    assert len(chain(first)) == 4
    assert chain(first) == chain(again)


def test_graphs_or_single_steps_give_the_same_run(cuda: str, tmp_path: Path):
    eager = run(tmp_path / "eager", "actor_rollout_ref.rollout.enforce_eager=true")
    assert chain(run(tmp_path / "graphs")) == chain(eager)


def test_training_on_another_stream_does_not_change_the_run(
    cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ahead = run(tmp_path / "streams")
    monkeypatch.setattr(DeviceStream, "use", lambda self: None)
    monkeypatch.setattr(DeviceStream, "_wait", lambda self: None)
    assert chain(run(tmp_path / "one stream")) == chain(ahead)


def test_in_order_of_completion_no_token_is_older_than_allowed(cuda: str, tmp_path: Path):
    ran = run(tmp_path, *CHATTY, "trainer.async_order=completion")
    assert max(ran.course("async/staleness_max")) <= 1


def test_nothing_is_captured_while_another_thread_trains(
    cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    captured: list[bool] = []
    plain = torch.cuda.CUDAGraph.capture_begin

    def noted(self: torch.cuda.CUDAGraph, *given: object, **named: object) -> None:
        captured.append(CALLS._is_owned())  # type: ignore[attr-defined]
        plain(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", noted)
    run(tmp_path)
    assert captured
    assert all(captured)
