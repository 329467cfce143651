"""What a worker extension of vLLM finds in `self`: the model of this worker, and its loader."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from tests.peers.driver import EngineDriver


@final
class _Model:
    """The model as vLLM's workers hold it."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names of the checkpoint; the real one has fused some."""
        return self._driver.policy.model.named_parameters()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors by the names of the checkpoint; the names that it knew."""
        given = dict(weights)
        self._driver.load(given)
        return set(given)


@final
class _ModelRunner:
    def __init__(self, driver: EngineDriver) -> None:
        self.model = _Model(driver)

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Load what an iterator gives."""
        self.model.load_weights(weights_iterator)


class PeerWorker:
    """Base of the worker; an extension's methods are called on it."""

    def __init__(self, driver: EngineDriver, reload: Callable[[str], None]) -> None:
        self.driver = driver
        self.model_runner = _ModelRunner(driver)
        self.device = torch.device("cpu")
        self.rank = self.local_rank = 0
        self._reload = reload

    def reload_weights(self, weights_path: str) -> None:
        """Load the weights of a folder."""
        self._reload(weights_path)


def make_worker(
    driver: EngineDriver, extension: type | None, *, reload: Callable[[str], None]
) -> Any:
    """A worker, with the methods of an extension."""
    bases = (PeerWorker,) if extension is None else (PeerWorker, extension)
    return type("Worker", bases, {})(driver, reload)
