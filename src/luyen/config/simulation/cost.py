"""Time of decoding, of passes and of transfers, from a model's shape and constants of hardware.

Closed forms. Products take their operations over a share of the rate of a large product; whatever
else a pass does takes the bytes that it moves. Transfers of sharded weights are hidden behind a
share of the pass they belong to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil
from typing import final

from luyen.config.model_folder.config_json import ModelShape
from luyen.config.simulation.hardware import Hardware

_BF16, _FP32 = 2, 4
_PARTS = ("compute", "memory", "network", "latency", "host")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of some work by what they wait for; they add up.

    Example:
        >>> both = Cost(compute=2.0) + Cost(memory=1.0).times(3)
        >>> both.seconds, both.bound
        (5.0, 'memory')
    """

    compute: float = 0.0
    """Matrix products and attention."""
    memory: float = 0.0
    """Bytes between a device and its memory."""
    network: float = 0.0
    """Bytes between devices that nothing hides."""
    latency: float = 0.0
    """Kernels, launches and messages, however small."""
    host: float = 0.0
    """The controller, host memory and disks."""
    sent: float = 0.0
    """Bytes that a device sends to other devices, hidden or not."""

    @property
    def seconds(self) -> float:
        """All parts."""
        return self.compute + self.memory + self.network + self.latency + self.host

    @property
    def bound(self) -> str:
        """The part that takes most."""
        return max(_PARTS, key=lambda part: float(getattr(self, part)))

    def __add__(self, other: "Cost") -> "Cost":
        names = (*_PARTS, "sent")
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def times(self, number: float) -> "Cost":
        """The cost of so many repetitions."""
        names = (*_PARTS, "sent")
        return Cost(**{name: getattr(self, name) * number for name in names})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationWork:
    """What one copy of the engine generates; lengths are spread evenly over a range.

    Example:
        >>> work = GenerationWork(prompts=2, samples=4, prompt=(5, 5), new=(3, 3))
        >>> work.sequences, work.read_tokens
        (8, 10)
    """

    prompts: int
    """Prompts."""
    samples: int = 1
    """Answers to each."""
    prompt: tuple[int, int]
    """Least and most tokens of a prompt."""
    new: tuple[int, int]
    """Least and most tokens of an answer."""
    rows: int = 1024
    """Most sequences at once."""
    pass_tokens: int = 32768
    """Most prompt tokens of a pass."""

    @property
    def sequences(self) -> int:
        """Answers in all."""
        return self.prompts * self.samples

    @property
    def read_tokens(self) -> int:
        """Tokens of all prompts; the samples of a prompt share it."""
        return round(self.prompts * (self.prompt[0] + self.prompt[1]) / 2)

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, answer) of each sequence, in an order without pattern, always the same."""
        return [
            (_spread(index // self.samples, *self.prompt, 0.7548776662), _spread(index, *self.new))
            for index in range(self.sequences)
        ]


def _spread(index: int, low: int, high: int, step: float = 0.6180339887) -> int:
    """The length at this place of a sequence that fills the range evenly."""
    return low + int(((index + 0.5) * step) % 1.0 * (high - low + 1))


def decode_segments(work: GenerationWork) -> Iterator[tuple[int, int, int]]:
    """(steps, rows, tokens read by all rows in all steps) while the running rows stay the same.

    The first token of an answer belongs to its prompt. A row that ends makes room for another.

    Example:
        >>> list(decode_segments(GenerationWork(prompts=2, prompt=(5, 5), new=(3, 3))))
        [(2, 2, 26)]
    """
    waiting = [(prompt, new - 1) for prompt, new in reversed(work.lengths()) if new > 1]
    running: list[tuple[int, int]] = []
    for _ in range(min(max(1, work.rows), len(waiting))):
        prompt, steps = waiting.pop()
        running.append((steps, prompt + steps))
    heapify(running)
    now, contexts = 0, sum(end - steps for steps, end in running)
    while running:
        rows, steps = len(running), running[0][0] - now
        # Each step reads the prompt, what was generated, and the token itself.
        yield steps, rows, steps * contexts + rows * steps * (steps + 1) // 2
        now, contexts = now + steps, contexts + rows * steps
        while running and running[0][0] == now:
            contexts -= heappop(running)[1]
            if waiting:
                prompt, more = waiting.pop()
                heappush(running, (now + more, prompt + more))
                contexts += prompt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """Tokens of one pass on one device, of which some get a log-probability.

    Example:
        >>> PassWork(tokens=100, scored=50, context=200.0).scored
        50
    """

    tokens: int
    """Tokens that are computed, a shared prompt once."""
    scored: int
    """Tokens whose logits are made."""
    context: float
    """Keys that a token looks at, on average."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Costs of one model on a kind of hardware, or of its share on `split` devices.

    Example:
        >>> from luyen.config.simulation.hardware import H200
        >>> shape = ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64,
        ...                    intermediate=1536, vocab=49152, is_tied=True)
        >>> cost = ModelCost(shape=shape, hardware=H200).decode_step(rows=256, contexts=256 * 1024)
        >>> round(cost.seconds * 1e3, 1)
        2.5
    """

    shape: ModelShape
    """Of the model."""
    hardware: Hardware
    """What it runs on."""
    split: int = 1
    """Devices that share a copy for generation (tensor parallelism)."""
    is_eager: bool = False
    """Whether every kernel of a decode step is launched by the host, instead of a graph."""

    def generation(self, work: GenerationWork) -> Cost:
        """All prompts read and all answers generated by one copy."""
        total = self.reading(work)
        for steps, rows, contexts in decode_segments(work):
            total += self.decode_step(rows=rows, contexts=contexts / steps).times(steps)
        return total

    def reading(self, work: GenerationWork) -> Cost:
        """Prompts read in passes, of which each takes at least its launches."""
        passes = ceil(work.read_tokens / max(1, work.pass_tokens))
        if not passes:
            return Cost()
        context = (work.prompt[0] + work.prompt[1]) / 4
        scored = ceil(work.sequences / passes)
        tokens = PassWork(tokens=ceil(work.read_tokens / passes), scored=scored, context=context)
        device = self.forward(tokens).times(1 / self.split) + self._reduced(tokens.tokens)
        launched = self.shape.layers * self.hardware.launch_time.value
        waits = Cost(latency=max(0.0, launched - device.seconds))
        return (device + waits).times(passes)

    def decode_step(self, *, rows: int, contexts: float) -> Cost:
        """One token for each row; `contexts` are the cached tokens of all rows together."""
        shape, hardware = self.shape, self.hardware
        rate = hardware.product_rate.value * hardware.row_share.value
        cached = contexts * shape.kv_bytes_per_token(_BF16) / min(self.split, shape.kv_heads)
        # Logits are written and read once, as numbers of two bytes.
        moved = (self._read_weights(rows) + 2 * rows * shape.vocab) * _BF16 / self.split
        copied = hardware.copy_rate.value
        waits = hardware.launch_time if self.is_eager else hardware.layer_latency
        return Cost(
            compute=rows
            * (self._products(rate) + 2 * shape.vocab * shape.hidden / rate)
            / self.split,
            memory=moved / copied + cached / (copied * hardware.cache_share.value),
            latency=shape.layers * waits.value,
        ) + self._reduced(rows)

    def forward(self, work: PassWork) -> Cost:
        """A forward pass on one device that has all weights, or gathers them."""
        shape, hardware = self.shape, self.hardware
        rate = hardware.product_rate.value * hardware.product_share.value
        head = 2 * shape.vocab * shape.hidden / rate
        compute = work.tokens * self._products(rate) + work.scored * head + self._attention(work)
        logits = 2 * work.scored * shape.vocab * _BF16
        return Cost(compute=compute, memory=self._traffic(work) + logits / hardware.copy_rate.value)

    def backward(self, work: PassWork, *, trains_all: bool, recomputes: bool) -> Cost:
        """The backward pass after `forward`; logits are computed again, and layers if so chosen."""
        shape, hardware = self.shape, self.hardware
        rate = hardware.product_rate.value * hardware.product_share.value
        layers = work.tokens * self._products(rate)
        head = work.scored * 2 * shape.vocab * shape.hidden / rate
        gradients = 2 if trains_all else 1  # frozen weights have no gradient of their own
        again = 1 if recomputes else 0
        attention = (2.5 + again) * self._attention(work)
        logits = 4 * work.scored * shape.vocab * _BF16 / hardware.copy_rate.value
        return Cost(
            compute=(gradients + again) * layers + (1 + gradients) * head + attention,
            memory=(2 + again) * self._traffic(work) + logits,
        )

    def _products(self, rate: float) -> float:
        """Seconds of the products of all layers for one token; those of experts are slower."""
        shape = self.shape
        rest = shape.active_layer_parameters() - 2 * shape.hidden
        chosen = shape.intermediate * shape.experts_per_token
        experts = 3 * shape.hidden * chosen if shape.experts > 1 else 0
        slowed = rest - experts + experts / self.hardware.expert_share.value
        return 2 * shape.layers * slowed / rate

    def _attention(self, work: PassWork) -> float:
        """Seconds of queries with keys and of weights with values."""
        shape, hardware = self.shape, self.hardware
        wide = shape.heads * shape.head_dim
        rate = hardware.product_rate.value * hardware.attention_share.value
        return 4 * shape.layers * wide * work.context * work.tokens / rate

    def _traffic(self, work: PassWork) -> float:
        """Seconds in which the layers of a forward pass move what they compute with."""
        shape, hardware = self.shape, self.hardware
        # Two norms and two sums of the stream; queries, keys, values and what attention gave; gate,
        # product and activation of the feed-forward layer. Each is written and read.
        each = 10 * shape.hidden + 4 * shape.heads * shape.head_dim + 2 * shape.attention_width()
        each += 6 * shape.active_intermediate
        moved = each * _BF16 * shape.layers * work.tokens
        return moved * hardware.traffic_share.value / hardware.copy_rate.value

    def _read_weights(self, rows: int) -> float:
        """Weights that a decode step reads: all, but of experts only those that a row chose."""
        shape = self.shape
        head = shape.vocab * shape.hidden
        if shape.experts == 1:
            return shape.layers * shape.layer_parameters() + head
        chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** rows
        experts = 3 * shape.hidden * shape.intermediate * shape.experts
        rest = shape.layer_parameters() - experts
        return shape.layers * (rest + chosen * experts) + head

    def _reduced(self, tokens: int) -> Cost:
        """Two sums over the devices of a copy in each layer."""
        if self.split == 1:
            return Cost()
        hardware, sums = self.hardware, 2 * self.shape.layers
        sent = sums * 2 * (self.split - 1) / self.split * tokens * self.shape.hidden * _BF16
        return Cost(
            network=sent / hardware.ring_rate(self.split),
            latency=sums * hardware.latency(self.split),
            sent=sent,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """How ranks hold a model: `share` of them one copy, the rest further copies.

    Example:
        >>> ShardLayout(world=16, share=8, ranks_per_sequence=1).copies
        2
    """

    world: int
    """Ranks that train together."""
    share: int
    """Consecutive ranks that hold one copy."""
    ranks_per_sequence: int
    """Consecutive ranks that compute each sequence together."""
    frees_layers: bool = True
    """Whether gathered layers are freed after the forward pass."""
    is_offloaded: bool = False
    """Whether shards and optimizer are in host memory."""

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.world // self.share


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """What sharding adds to passes, and what an optimizer step takes.

    Example:
        >>> from luyen.config.simulation.hardware import H200
        >>> shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4,
        ...                    intermediate=16, vocab=10, is_tied=True)
        >>> alone = ShardLayout(world=1, share=1, ranks_per_sequence=1)
        >>> cost = ShardCost(shape=shape, hardware=H200, layout=alone, learned=shape.parameters())
        >>> cost.around(Cost(compute=1.0), learns=True).seconds
        1.0
    """

    shape: ModelShape
    """Of the model."""
    hardware: Hardware
    """What ranks run on."""
    layout: ShardLayout
    """How ranks hold it."""
    learned: int
    """Weights that learn."""

    def around(self, device: Cost, *, learns: bool) -> Cost:
        """A pass with its transfers: what the device's work does not hide is added."""
        layout, hardware = self.layout, self.hardware
        if layout.world == 1:
            return device
        units = self.shape.layers + 1
        gathers = 2 if learns and layout.frees_layers else 1
        layers = self.shape.layers * self.shape.layer_parameters() * _BF16
        root = self._ring(self.shape.embeddings() * _BF16)
        moved = self._ring(gathers * layers)
        if learns:
            moved += self._ring(self.learned * _FP32) + self._between_copies()
            units += units + (self.shape.layers if gathers == 2 else 0)
        host = self._from_host(gathers, learns=learns) if layout.is_offloaded else 0.0
        waits = units * hardware.latency(layout.share) if layout.share > 1 else 0.0
        hidden = hardware.overlap_share.value * device.seconds
        left = max(0.0, moved.network + waits + host - hidden)
        added = Cost(network=root.network + left, sent=moved.sent + root.sent)
        return device + added

    def exchange(self, tokens: int, *, learns: bool) -> Cost:
        """All-to-alls around attention, where several ranks compute a sequence (Ulysses)."""
        ranks, hardware, shape = self.layout.ranks_per_sequence, self.hardware, self.shape
        if ranks == 1:
            return Cost()
        wide = shape.heads * shape.head_dim
        times = 2 if learns else 1
        sent = times * shape.layers * (ranks - 1) / ranks * tokens * _BF16
        sent *= shape.attention_width() + wide
        return Cost(
            network=sent / hardware.ring_rate(ranks),
            latency=2 * times * shape.layers * hardware.latency(ranks),
            sent=sent,
        )

    def optimizer_step(self) -> Cost:
        """Gradients, masters and two moments read, the latter two and weights written."""
        own = self.learned / self.layout.share
        if self.layout.is_offloaded:
            return Cost(host=own * 28 / self.hardware.adam_rate.value)
        # 4 of gradients twice, for their norm first; 8 each of masters and moments; 2 of weights.
        return Cost(memory=own * 34 / self.hardware.copy_rate.value)

    def _ring(self, size: float) -> Cost:
        """A gather or a reduce-scatter of so many bytes over the ranks of a copy."""
        share = self.layout.share
        sent = (share - 1) / share * size
        return Cost(network=sent / self.hardware.ring_rate(share), sent=sent)

    def _between_copies(self) -> Cost:
        """A sum of gradient shards over all copies; each rank with its counterparts."""
        layout, hardware = self.layout, self.hardware
        copies = layout.copies
        sent = 2 * (copies - 1) / copies * self.learned * _FP32 / layout.share
        is_inside = layout.world <= hardware.gpus_per_node
        rate = hardware.ring_rate(layout.world) if is_inside else hardware.adapter_rate()
        waits = self.shape.layers * hardware.latency(layout.world) if copies > 1 else 0.0
        return Cost(network=sent / rate + waits, sent=sent)

    def _from_host(self, gathers: int, *, learns: bool) -> float:
        """Seconds in which shards come from host memory, and gradients go there."""
        moved = gathers * self.shape.parameters() * _FP32 + (self.learned * _FP32 if learns else 0)
        return moved / self.layout.share / self.hardware.host_rate.value
