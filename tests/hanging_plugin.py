"""An engine and an optimizer that hang in C code once they were called often enough."""

import ctypes
from typing import Any

from luyen.engine.optim import MasterOptimizer
from luyen.rollout.engines import native
from luyen.rollout.protocol import RolloutEngine, rollout_engines
from tests.hanging import is_time_to_hang


@rollout_engines.register("stuck")
def stuck(*args: Any, **kwargs: Any) -> RolloutEngine:
    """The embedded engine, whose pass may block: with the interpreter free, or held."""
    engine: Any = native(*args, **kwargs)
    advance = engine.advance

    def blocked() -> Any:
        if is_time_to_hang("pass"):
            ctypes.CDLL(None).sleep(60)
        if is_time_to_hang("locked"):
            ctypes.PyDLL(None).sleep(60)
        return advance()

    engine.advance = blocked
    return engine


def _hanging(step: Any) -> Any:
    def stepped(self: MasterOptimizer, lr: float) -> Any:
        if is_time_to_hang("update"):
            ctypes.CDLL(None).sleep(60)
        return step(self, lr)

    return stepped


MasterOptimizer.step = _hanging(MasterOptimizer.step)
