"""What a simulated machine does per second, each number with where it comes from.

`measured`: on one H200, see docs/benchmarks.md. `specified`: by the vendor. `assumed`: neither, so
that what depends on it is a guess until it is measured. `given`: on the command line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, log2
from typing import Literal, TypeAlias, final

from luyen.base.errors import UserError, did_you_mean

Source: TypeAlias = Literal["measured", "specified", "assumed", "given"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number about hardware.

    Example:
        >>> Constant(value=4.2e12, unit="B/s", source="measured", note="a large copy").source
        'measured'
    """

    value: float
    """The number."""
    unit: str
    """Its unit."""
    source: Source
    """Where it comes from."""
    note: str
    """What it is, and how it was found."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A node of GPUs, and how nodes are connected.

    Example:
        >>> H200.gpus_per_node, H200.copy_rate.source, H200.network_rate.source
        (8, 'measured', 'assumed')
    """

    name: str
    """Name of the GPU."""
    memory_bytes: int
    """Memory of a GPU."""
    gpus_per_node: int
    """GPUs of a node."""
    copy_rate: Constant
    """Bytes read and written by a large copy."""
    product_rate: Constant
    """Operations of a large matrix product in bf16."""
    product_share: Constant
    """Share of `product_rate` in the products of a forward or backward pass."""
    row_share: Constant
    """Share of `product_rate` in the products of a decode step."""
    expert_share: Constant
    """Share of the former two that products of experts reach."""
    attention_share: Constant
    """Share of `product_rate` in the attention of a pass."""
    cache_share: Constant
    """Share of `copy_rate` with which cached keys and values are read."""
    traffic_share: Constant
    """Bytes that a pass moves over those of its closed form."""
    layer_latency: Constant
    """Time of a decode step for each layer that depends neither on rows nor on weights."""
    launch_time: Constant
    """Time in which the host launches a layer of a forward pass."""
    rollout_time: Constant
    """Time of the controller for each rollout: tokenise, score, pack, digest, record."""
    link_rate: Constant
    """Bytes per second and direction between GPUs of a node."""
    link_share: Constant
    """Share of `link_rate` that a collective reaches."""
    network_rate: Constant
    """Bytes per second and direction of each GPU to other nodes."""
    network_share: Constant
    """Share of `network_rate` that a collective reaches."""
    link_latency: Constant
    """Latency of a collective for each doubling of ranks in a node."""
    network_latency: Constant
    """The same for each doubling of nodes."""
    overlap_share: Constant
    """Share of the device's work behind which transfers of sharded weights are hidden."""
    host_rate: Constant
    """Bytes per second between a GPU and host memory."""
    store_rate: Constant
    """Bytes per second of one process into Ray's object store."""
    node_rate: Constant
    """Bytes per second of Ray's object store between two nodes."""
    ipc_rate: Constant
    """Bytes per second of weights into a vLLM server on the same GPU (`ipc`)."""
    folder_rate: Constant
    """Bytes per second of weights into a server through a file (`folder`)."""
    disk_rate: Constant
    """Bytes per second of a node to where checkpoints are written."""
    adam_rate: Constant
    """Bytes per second and GPU of an optimizer step on the host (offload)."""

    def constants(self) -> Iterator[tuple[str, Constant]]:
        """Every constant with its name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Constant):
                yield field.name, value

    def with_values(self, given: Mapping[str, float]) -> "Hardware":
        """The same with other values; a UserError for an unknown name or a value that is none.

        Example:
            >>> H200.with_values({"link_share": 0.5}).link_share.source
            'given'
        """
        known = dict(self.constants())
        changed: dict[str, Constant] = {}
        for name, value in given.items():
            if name not in known:
                fix = did_you_mean(name, known)
                raise UserError("--constant", name, "there is no such constant", fix)
            if not 0 < value < float("inf"):
                raise UserError("--constant", f"{name}={value}", "it must be above 0", "change it")
            changed[name] = replace(known[name], value=value, source="given")
        return replace(self, **changed)  # type: ignore[arg-type]

    def ring_rate(self, ranks: int) -> float:
        """Bytes per second of each rank in a ring over so many consecutive ranks."""
        inside = self.link_rate.value * self.link_share.value
        if ranks <= self.gpus_per_node:
            return inside
        # Rings begin at every GPU of a node, so that each of its adapters carries a share.
        return min(inside, self.gpus_per_node * self.adapter_rate())

    def adapter_rate(self) -> float:
        """Bytes per second of one GPU to a GPU of another node."""
        return self.network_rate.value * self.network_share.value

    def latency(self, ranks: int) -> float:
        """Seconds of a collective of so many consecutive ranks without any bytes."""
        inside = min(ranks, self.gpus_per_node)
        nodes = ceil(ranks / self.gpus_per_node)
        steps = log2(inside) * self.link_latency.value if inside > 1 else 0.0
        return steps + (log2(nodes) * self.network_latency.value if nodes > 1 else 0.0)


def _measured(value: float, unit: str, note: str) -> Constant:
    return Constant(value=value, unit=unit, source="measured", note=note)


def _assumed(value: float, unit: str, note: str) -> Constant:
    return Constant(value=value, unit=unit, source="assumed", note=note)


H200 = Hardware(
    name="H200",
    memory_bytes=139 * 1024**3,
    gpus_per_node=8,
    copy_rate=_measured(4.2e12, "B/s", "a large copy: 4.1 to 4.3e12 in several sessions"),
    product_rate=_measured(7.7e14, "FLOP/s", "a large product: 7.6 to 7.8e14"),
    product_share=_measured(0.80, "1", "fitted: reading prompts in the 1.5B shape"),
    row_share=_measured(0.71, "1", "fitted: decoding 256 rows in the 1.5B shape"),
    expert_share=_assumed(0.5, "1", "no mixture was measured"),
    attention_share=_assumed(0.5, "1", "attention was not measured apart in training"),
    cache_share=_measured(1.02, "1", "fitted: decoding 256 and 1,024 rows in the 135M shape"),
    traffic_share=_measured(1.6, "1", "fitted: the update of the 135M shape"),
    layer_latency=_measured(30.5e-6, "s", "fitted: as cache_share"),
    launch_time=_measured(1.27e-3, "s", "30 to 46 ms for the 30 layers of the 135M shape"),
    rollout_time=_measured(0.7e-3, "s", "fitted: a whole GRPO step through the roles of a run"),
    link_rate=Constant(value=450e9, unit="B/s", source="specified", note="NVLink 4"),
    link_share=_assumed(0.75, "1", "nothing was measured between two GPUs"),
    network_rate=_assumed(50e9, "B/s", "an adapter of 400 Gbit/s for each GPU"),
    network_share=_assumed(0.8, "1", "nothing was measured between two nodes"),
    link_latency=_assumed(10e-6, "s", "nothing was measured between two GPUs"),
    network_latency=_assumed(20e-6, "s", "nothing was measured between two nodes"),
    overlap_share=_assumed(0.9, "1", "no sharded pass was timed on several GPUs"),
    host_rate=_assumed(50e9, "B/s", "PCIe 5 with 16 lanes (64e9 specified)"),
    store_rate=_assumed(2e9, "B/s", "one copy by one process"),
    node_rate=_assumed(5e9, "B/s", "TCP from one node to all other nodes at once"),
    ipc_rate=_measured(5.3e9, "B/s", "1.54B weights in 0.58 s"),
    folder_rate=_measured(1.29e9, "B/s", "1.54B weights in 2.4 s, one server"),
    disk_rate=_assumed(2e9, "B/s", "a shared file system"),
    adam_rate=_assumed(25e9, "B/s", "host memory of a node, divided by 8 GPUs"),
)
"""An H200 with 8 GPUs a node."""
