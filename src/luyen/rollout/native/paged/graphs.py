"""Work of a fixed shape as CUDA graphs, captured at first need."""

import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar, final

import torch

from luyen.models.device_lock import CALLS
from luyen.models.policy import Policy
from luyen.models.weights import is_adapter_layer

_WARM_UP = 2
_LOG = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Hashable)


@final
class GraphCache(Generic[Kind]):
    """Captured graphs by the kind of their work.

    Graphs hold addresses. They are captured again when the tensors that they read have moved, and
    when other adapters are in use.
    """

    def __init__(self, name: str, *, is_eager: bool) -> None:
        """`name` is what a warning calls the work; with `is_eager` nothing is captured."""
        self._name = name
        self.is_eager = is_eager
        """Whether work is launched call by call."""
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._state: tuple[object, ...] = ()
        """Where all that is read lies, and which adapters are in use."""
        self._pool: Any = None

    def prepare(self, policy: Policy, *addresses: int) -> bool:
        """Forget graphs that would no longer compute the same; whether they were forgotten."""
        if self.is_eager:
            return False
        found = (*_state_of(policy), *addresses)
        if found == self._state:
            return False
        self.clear()
        self._state = found
        return True

    def clear(self) -> None:
        """Forget every graph and the memory behind it."""
        self._graphs.clear()
        self._pool = None

    def __contains__(self, kind: Kind) -> bool:
        """Whether the work needs no capture now: it is captured, or never is."""
        return self.is_eager or kind in self._graphs

    def get(self, kind: Kind, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph of this work; None: it is launched call by call.

        At first need `work` runs to warm up, and once more to be captured. While another thread
        trains nothing is captured.
        """
        if self.is_eager or kind in self._graphs:
            return self._graphs.get(kind)
        if not CALLS.acquire(blocking=False):
            return None
        try:
            self._graphs[kind] = self._record(work)
        except RuntimeError as error:
            self._fall_back_to_eager(error)
        finally:
            CALLS.release()
        return self._graphs.get(kind)

    def _fall_back_to_eager(self, error: RuntimeError) -> None:
        """Go on without graphs: some layers copy from the host, which cannot be captured."""
        if not any(word in str(error) for word in ("captur", "operation not permitted")):
            raise error
        torch.cuda.synchronize()
        self.clear()
        self.is_eager = True
        reason = str(error).splitlines()[0]
        _LOG.warning("%s of this model cannot be captured as graphs (%s)", self._name, reason)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        return graph


def _state_of(policy: Policy) -> Iterator[object]:
    """What a captured pass depends on, the numbers in the weights apart."""
    yield policy.is_exact
    for tensor in (*policy.parameters(), *policy.buffers()):
        yield tensor.data_ptr()
    layers: list[Any] = [module for module in policy.modules() if is_adapter_layer(module)]
    for layer in layers:
        yield from (layer.disable_adapters, layer.merged, *layer.active_adapters)
        yield from layer.scaling.items()
