"""What captured passes read stays theirs, and what they depend on is noticed when it changes.

Graphs are played by a stand-in that runs the work again, so that the bookkeeping can be followed
without a GPU.
"""

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch

from luyen.models.device_lock import CALLS
from luyen.models.lora import adapter_layers, adapter_off
from luyen.rollout.native.paged.graphs import GraphCache
from luyen.rollout.native.paged.kv_cache import KeyValues, cache_shape
from luyen.rollout.native.paged.prefill import PromptReader
from tests.generation import prompt
from tests.invariants.test_exactness import with_adapter
from tests.tiny_models import tiny_policy

SMALL, LARGE = prompt(100), prompt(300)
PAGES = {100: [[4, 2]], 300: [[1, 6, 3, 8, 5]]}


class Replayed:
    """A graph whose replay is the work once more."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> PromptReader:
    """A reader that captures on a CPU too."""
    torch.manual_seed(0)
    made = PromptReader(tiny_policy("llama"), tokens_at_once=4096, pages=6, is_eager=False)

    def record(_: Any, work: Callable[[], None]) -> Replayed:
        work()
        return Replayed(work)

    monkeypatch.setattr(GraphCache, "_record", record)
    made._graphs.is_eager = False
    return made


def read(reader: PromptReader, cache: KeyValues, tokens: Sequence[int]) -> torch.Tensor:
    return reader.read(cache, [tokens], PAGES[len(tokens)], [0])


class OtherThread:
    """Holds the lock of the device, as a thread that trains does."""

    def __enter__(self) -> None:
        self._has_it, self._is_over = Event(), Event()
        self._thread = Thread(target=self._hold)
        self._thread.start()
        assert self._has_it.wait(10)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _hold(self) -> None:
        with CALLS:
            self._has_it.set()
            assert self._is_over.wait(30)


def test_a_pass_that_cannot_be_captured_now_leaves_the_others_what_they_read(reader: PromptReader):
    cache = KeyValues(cache_shape(reader._policy), 12, device=reader._policy.device)
    reader.prepare(cache)
    first = read(reader, cache, SMALL)
    (shape,) = reader._buffers
    read_by_the_graph = reader._buffers[shape].numbers
    with OtherThread():
        large = read(reader, cache, LARGE)
    assert list(reader._buffers) == [shape], "nothing was captured for the other one"
    again = read(reader, cache, [*SMALL[:-1], SMALL[-1] + 1])
    assert reader._buffers[shape].numbers is read_by_the_graph
    assert not torch.equal(again, first), "the graph reads the numbers of this pass"
    assert torch.equal(read(reader, cache, SMALL), first)
    torch.testing.assert_close(read(reader, cache, LARGE), large)
    assert len(reader._buffers) == 2


def test_passes_that_can_never_be_captured_keep_no_memory(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch
):
    cache = KeyValues(cache_shape(reader._policy), 12, device=reader._policy.device)
    reader.prepare(cache)
    first = read(reader, cache, SMALL)

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphCache, "_record", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    read(reader, cache, LARGE)
    assert not reader.is_captured
    assert not reader._buffers
    torch.testing.assert_close(read(reader, cache, SMALL), first)


@pytest.fixture
def graphs() -> GraphCache[str]:
    return GraphCache[str]("work", is_eager=False)


def test_graphs_are_forgotten_when_a_weight_or_a_buffer_moves(graphs: GraphCache[str]):
    policy = tiny_policy("llama")
    assert graphs.prepare(policy, 7)
    assert not graphs.prepare(policy, 7)
    assert graphs.prepare(policy, 8), "the cache has moved"
    weight = next(policy.parameters())
    with torch.no_grad():
        weight.add_(1)
    assert not graphs.prepare(policy, 8), "a write in place is read by the graph"
    weight.data = weight.data.clone()
    assert graphs.prepare(policy, 8)
    name, buffer = next(iter(policy.named_buffers()))
    owner: Any = policy.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], buffer.clone())
    assert graphs.prepare(policy, 8)


def test_graphs_are_forgotten_when_an_adapter_is_switched(graphs: GraphCache[str]):
    policy = with_adapter()
    graphs.prepare(policy)
    assert not graphs.prepare(policy)
    with adapter_off(policy):
        assert graphs.prepare(policy)
    assert graphs.prepare(policy)
    layer = next(iter(adapter_layers(policy).values()))
    layer.scaling["default"] *= 2
    assert graphs.prepare(policy)
    assert not graphs.prepare(policy)
