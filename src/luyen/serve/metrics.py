"""Prometheus metrics of a server."""

from collections.abc import Callable
from typing import final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST


@final
class ServerMetrics:
    """Counts of requests and tokens, and how long requests take."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._readers: dict[str, list[Callable[[], float]]] = {}
        registry = self._registry
        self.requests = Counter(
            "luyen_requests_total",
            "Requests by endpoint and status.",
            ("path", "status"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "luyen_prompt_tokens_total", "Tokens of prompts that were answered.", registry=registry
        )
        self.generated_tokens = Counter(
            "luyen_generated_tokens_total", "Tokens of finished answers.", registry=registry
        )
        self.seconds = Histogram(
            "luyen_request_seconds",
            "Time from a request to the end of its reply.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "luyen_first_token_seconds",
            "Time from a request to the first token of its stream.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.aborted = Counter(
            "luyen_aborted_requests_total", "Requests whose client went away.", registry=registry
        )
        self.swaps = Counter(
            "luyen_weight_swaps_total", "Changes of the weights.", registry=registry
        )

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when metrics are; the sum, where several readers have its name."""
        if name in self._readers:
            self._readers[name].append(read)
            return
        readers = self._readers[name] = [read]
        gauge = Gauge(name, help, registry=self._registry)
        gauge.set_function(lambda: sum(one() for one in readers))

    def page(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
