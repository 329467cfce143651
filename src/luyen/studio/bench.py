"""Benchmarks of generation and of a GRPO step, compared with the roofline of the device."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, final

import torch

from luyen.algorithms.advantages.group import grpo
from luyen.algorithms.advantages.inputs import CreditInputs
from luyen.algorithms.objective import Objective
from luyen.base.seeds import derive_key
from luyen.config.schema.actor_rollout_ref import OptimConfig, RolloutConfig
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import MicroBatching, PackedBatch, flat_tensor, pack
from luyen.engine.optim import build_optimizer
from luyen.models.packed_attention import share_prompts
from luyen.models.policy import Policy
from luyen.rollout.engines import native
from luyen.rollout.native.paged.kv_cache import cache_shape
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling, generate

# Roofline: the bytes that must be moved and the operations that must be executed.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured peak bandwidth and matrix throughput of the device.

    Example:
        >>> Ceilings(bytes_per_second=4.3e12, flops_per_second=7.9e14).bytes_per_second
        4300000000000.0
    """

    bytes_per_second: float
    """A large copy, bytes read and written."""
    flops_per_second: float
    """A large matrix product in the model's type."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model that determine the roofline.

    Example:
        >>> sizes = ModelSizes(
        ...     parameters=10, learning=1, weight_bytes=20, token_bytes=4, vocabulary=8
        ... )
        >>> sizes.update_flops(1)
        42.0
    """

    parameters: int
    """Numbers that take part in a forward pass."""
    learning: int
    """Those of them that learn."""
    weight_bytes: int
    """Bytes of them."""
    token_bytes: int
    """Bytes of keys and values of one token, over all layers."""
    vocabulary: int
    """Size of a row of logits."""

    @classmethod
    def of(cls, policy: Policy) -> "ModelSizes":
        """Of a policy; an input embedding that is not the head as well is looked up, not read."""
        shape = cache_shape(policy)
        net: Any = policy.model
        table, head = net.get_input_embeddings().weight, net.get_output_embeddings().weight
        used = [p for p in policy.parameters() if p is not table or table is head]
        return cls(
            parameters=sum(p.numel() for p in used),
            learning=sum(p.numel() for p in used if p.requires_grad),
            weight_bytes=sum(p.numel() * p.element_size() for p in used),
            token_bytes=2 * shape.layers * shape.heads * shape.width * shape.dtype.itemsize,
            vocabulary=policy.head.vocabulary,
        )

    def decode_bytes(self, steps: int, generated: int, contexts: int) -> float:
        """Weights once a step, every key once a token, logits written and read once (2 bytes)."""
        logit_bytes = generated * self.vocabulary * 4
        return steps * self.weight_bytes + contexts * self.token_bytes + logit_bytes

    def update_flops(self, tokens: int) -> float:
        """Two a weight forward, two backward, and two if it learns, for each token.

        Attention comes on top.
        """
        return (4.0 * self.parameters + 2.0 * self.learning) * tokens


def measure_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large product, each the best of several."""
    is_gpu = device == "cuda"
    count, side = ((1 << 30), 8192) if is_gpu else ((1 << 26), 1024)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device).to(dtype)
    copy = best_seconds(lambda: target.copy_(source), device)
    product = best_seconds(lambda: torch.mm(a, a), device)
    return Ceilings(bytes_per_second=2 * count / copy, flops_per_second=2 * side**3 / product)


def best_seconds(action: Callable[[], object], device: str, *, repeats: int = 5) -> float:
    """The shortest of several runs, the device's work included; one run before them warms up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def wait(device: str) -> None:
    """Synchronize with the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Count the most memory in use from here on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """Most memory in use since `reset_peak`; 0 where it is not counted."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


# Workloads: prompts and responses of given lengths, reproducible by seed.

_LARGEST_TOKEN = 10_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and answers of a measurement; lengths are spread evenly at random over a range.

    Example:
        >>> [len(r.tokens) for r in Workload(prompts=2, prompt=(5, 5), new=(3, 3)).requests(100)]
        [5, 5]
    """

    prompts: int = 256
    """Prompts."""
    samples: int = 1
    """Answers to each."""
    prompt: tuple[int, int] = (256, 256)
    """Least and most tokens of a prompt."""
    new: tuple[int, int] = (256, 256)
    """Least and most tokens of an answer; no answer stops before."""
    seed: int = 0
    """Decides tokens and lengths."""

    @property
    def longest(self) -> int:
        """Most tokens a sequence can have."""
        return self.prompt[1] + self.new[1]

    def requests(self, vocabulary: int) -> list[Request]:
        """One request a prompt.

        With 256 prompts and lengths of 100 to 1,024, prompts and answers are as long as those of
        nano-vllm's benchmark.
        """
        dice = Random(self.seed)
        largest = min(_LARGEST_TOKEN, vocabulary - 1)
        prompts = [
            tuple(dice.randint(0, largest) for _ in range(dice.randint(*self.prompt)))
            for _ in range(self.prompts)
        ]
        answers = [dice.randint(*self.new) for _ in range(self.prompts)]
        return [
            Request(
                id=f"{index}",
                tokens=tokens,
                keys=tuple(derive_key(self.seed, "bench", index, i) for i in range(self.samples)),
                sampling=Sampling(max_new_tokens=new, ignore_stop=True),
            )
            for index, (tokens, new) in enumerate(zip(prompts, answers, strict=True))
        ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """Results of a generation benchmark.

    Example:
        Made by `measure_rollout`, shown by `luyen bench rollout`.
    """

    tokens: int
    """Generated tokens."""
    seconds: float
    """From the first request to the last answer, prompts included."""
    prompt_seconds: float
    """Of that, prefill and the first tokens."""
    first_seconds: float
    """The very first round: kernels compiled, graphs captured."""
    tokens_per_second: float
    """Generated tokens over the whole time."""
    decode_tokens_per_second: float
    """Generated tokens over the time without prefill."""
    floor_seconds: float
    """Bytes that decoding must move over the device's bandwidth."""
    fraction: float
    """The floor over the time without prefill: 1 is perfect."""
    whole_fraction: float
    """The same floor over all of the time."""
    peak_bytes: int
    """Most memory of the device in use; 0 where it is not counted."""


def measure_rollout(
    policy: Policy, work: Workload, ceilings: Ceilings, *, rollout: RolloutConfig, rounds: int = 3
) -> RolloutFigures:
    """The best of several rounds after one that warms up."""
    engine = native(policy, rollout, longest=work.longest, decode=lambda _: "")
    requests = work.requests(policy.head.vocabulary)
    device = policy.device.type
    reset_peak(device)

    def seconds(batch: list[Request]) -> float:
        wait(device)
        start = time.perf_counter()
        generate(engine, batch)
        wait(device)
        return time.perf_counter() - start

    short = [_shortened(request) for request in requests]
    first = seconds(requests)
    seconds(short)
    prompts = min(seconds(short) for _ in range(rounds))
    whole = min(seconds(requests) for _ in range(rounds))
    peak = peak_bytes(device)
    engine.close()
    counts = [(len(r.tokens), r.sampling.max_new_tokens) for r in requests for _ in r.keys]
    generated = sum(new for _, new in counts)
    floor_seconds = _floor_bytes(policy, counts) / ceilings.bytes_per_second
    return RolloutFigures(
        tokens=generated,
        seconds=whole,
        prompt_seconds=prompts,
        first_seconds=first,
        tokens_per_second=generated / whole,
        decode_tokens_per_second=(generated - len(counts)) / max(1e-9, whole - prompts),
        floor_seconds=floor_seconds,
        fraction=floor_seconds / max(1e-9, whole - prompts),
        whole_fraction=floor_seconds / whole,
        peak_bytes=peak,
    )


def _floor_bytes(policy: Policy, counts: list[tuple[int, int]]) -> float:
    """Bytes that decoding must move, for (prompt tokens, new tokens) of each response."""
    # The first token of an answer belongs to its prompt.
    contexts = sum((new - 1) * length + new * (new - 1) // 2 for length, new in counts)
    steps = max(new for _, new in counts) - 1
    generated = sum(new - 1 for _, new in counts)
    return ModelSizes.of(policy).decode_bytes(steps, generated, contexts)


def _shortened(request: Request) -> Request:
    """The same prompt with a single token to generate."""
    sampling = type(request.sampling)(max_new_tokens=1, ignore_stop=True)
    return Request(id=request.id, tokens=request.tokens, keys=request.keys, sampling=sampling)


# Training: an optimizer step on generated responses, and a whole GRPO step.

_RATE = 1e-6
Answers: TypeAlias = Mapping[tuple[str, int], Completion]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Results of a training benchmark.

    Example:
        Made by `measure_step`, shown by `luyen bench train` and `luyen bench step`.
    """

    tokens: int
    """Tokens of all sequences, prompts counted for every answer."""
    computed: int
    """Tokens the model computed: a shared prompt counts once."""
    generate_seconds: float
    """Generation."""
    update_seconds: float
    """Advantages, log-probabilities, gradients and the optimizer."""
    floor_seconds: float
    """Operations of the update over the device's matrix rate."""
    fraction: float
    """The floor over the update's time: 1 is perfect."""
    parity_gap: float
    """Largest difference between the sampler's and the trainer's log-probabilities."""
    peak_bytes: int
    """Most memory of the device in use; 0 where it is not counted."""


def measure_step(
    policy: Policy,
    work: Workload,
    ceilings: Ceilings,
    *,
    rollout: RolloutConfig,
    max_tokens: int,
    rounds: int = 3,
    offload: bool = False,
) -> StepFigures:
    """Medians of several GRPO steps after one that warms up."""
    requests = work.requests(policy.head.vocabulary)
    engine = native(policy, rollout, longest=work.longest, decode=lambda _: "")
    optimizer = build_optimizer(policy, OptimConfig(lr=_RATE), offload=offload)
    actor = ActorEngine(policy, optimizer, MicroBatching(max_tokens=max_tokens), temperature=1.0)
    reset_peak(policy.device.type)
    steps = [_take_step(actor, engine, requests) for _ in range(rounds + 1)]
    peak = peak_bytes(policy.device.type)
    engine.close()
    optimizer.release()
    batch = steps[-1].batch
    computed = share_prompts(batch.tokens, batch.lengths, batch.layout.mask).first.numel()
    floor = ModelSizes.of(policy).update_flops(computed) / ceilings.flops_per_second
    updated = statistics.median(step.update_seconds for step in steps[1:])
    return StepFigures(
        tokens=batch.tokens.numel(),
        computed=computed,
        generate_seconds=statistics.median(step.generate_seconds for step in steps[1:]),
        update_seconds=updated,
        floor_seconds=floor,
        fraction=floor / updated,
        parity_gap=max(step.gap for step in steps),
        peak_bytes=peak,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """Times of one step.

    Example:
        Made by `_take_step`.
    """

    generate_seconds: float
    """Generation."""
    update_seconds: float
    """Everything after generation."""
    gap: float
    """Largest difference of log-probabilities."""
    batch: PackedBatch
    """The training batch."""


def _take_step(actor: ActorEngine, engine: RolloutEngine, requests: list[Request]) -> _Step:
    device = actor.policy.device
    start = time.perf_counter()
    found = generate(engine, requests)
    wait(device.type)
    generated_at = time.perf_counter()
    batch = _batch(requests, found, device)
    done = actor.update(batch, Objective(loss="vanilla", hparams={}), lr=_RATE, seed=0)
    wait(device.type)
    return _Step(
        generate_seconds=generated_at - start,
        update_seconds=time.perf_counter() - generated_at,
        gap=done.metrics["parity/max_gap"],
        batch=batch,
    )


def _batch(requests: list[Request], found: Answers, device: torch.device) -> PackedBatch:
    """Every response with its prompt, an advantage, and the log-probabilities of the sampler."""
    prompts = {request.id: (index, request.tokens) for index, request in enumerate(requests)}
    rows = [(*prompts[name], done) for (name, _), done in found.items()]
    batch = pack(
        [(*prompt, *done.tokens) for _, prompt, done in rows],
        masks=[[0] * len(prompt) + [1] * len(done.tokens) for _, prompt, done in rows],
        groups=[group for group, *_ in rows],
        device=device,
    )
    logps = flat_tensor((x for *_, done in rows for x in done.logps), torch.float32).to(device)
    # A reward that differs inside a group and costs nothing.
    worth = [done.tokens[-1] % 7 / 7 for *_, done in rows]
    ends = batch.layout.offsets[1:] - 1
    rewards = torch.zeros(batch.tokens.shape, device=device)
    rewards[ends] = torch.tensor(worth).to(device)
    credit = grpo(CreditInputs(rewards=rewards, layout=batch.layout))
    return batch.with_streams(rollout_logp=batch.scatter(logps), advantages=credit.advantages)
