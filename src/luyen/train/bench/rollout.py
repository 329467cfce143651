"""How fast the embedded engine answers, beside the bytes it cannot avoid."""

import time
from dataclasses import dataclass
from typing import final

from luyen.config.schema.rollout import Rollout
from luyen.models.policy import Policy
from luyen.rollout.engines import native
from luyen.rollout.protocol import Request, generate
from luyen.train.bench.roofline import Ceilings, Sizes, peak_bytes, reset_peak, wait
from luyen.train.bench.work import Work


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """What was measured.

    Example:
        Made by `measure_rollout`, shown by `luyen bench rollout`.
    """

    tokens: int
    """Tokens drawn."""
    seconds: float
    """From the first request to the last answer, prompts included."""
    prompt_seconds: float
    """Of that, reading prompts and drawing first tokens."""
    first_seconds: float
    """The very first round: kernels compiled, graphs captured."""
    tokens_per_second: float
    """Drawn tokens over all of the time."""
    decode_tokens_per_second: float
    """Drawn tokens over the time that was not spent on prompts."""
    floor_seconds: float
    """Bytes that decoding must move over the device's bandwidth."""
    fraction: float
    """The floor over the time that was not spent on prompts: 1 is perfect."""
    whole_fraction: float
    """The same floor over all of the time."""
    peak_bytes: int
    """Most memory of the device in use; 0 where it is not counted."""


def measure_rollout(
    policy: Policy, work: Work, ceilings: Ceilings, *, rollout: Rollout, rounds: int = 3
) -> RolloutFigures:
    """The best of several rounds after one that warms up."""
    engine = native(policy, rollout, longest=work.longest, decode=lambda _: "")
    asked = work.requests(policy.head.vocabulary)
    device = policy.device.type
    reset_peak(device)

    def seconds(requests: list[Request]) -> float:
        wait(device)
        start = time.perf_counter()
        generate(engine, requests)
        wait(device)
        return time.perf_counter() - start

    short = [_shortened(request) for request in asked]
    first = seconds(asked)
    seconds(short)
    prompts = min(seconds(short) for _ in range(rounds))
    whole = min(seconds(asked) for _ in range(rounds))
    peak = peak_bytes(device)
    engine.close()
    counts = [(len(r.tokens), r.sampling.max_new_tokens) for r in asked for _ in r.keys]
    drawn = sum(new for _, new in counts)
    floor_seconds = _floor_bytes(policy, counts) / ceilings.bytes_per_second
    return RolloutFigures(
        tokens=drawn,
        seconds=whole,
        prompt_seconds=prompts,
        first_seconds=first,
        tokens_per_second=drawn / whole,
        decode_tokens_per_second=(drawn - len(counts)) / max(1e-9, whole - prompts),
        floor_seconds=floor_seconds,
        fraction=floor_seconds / max(1e-9, whole - prompts),
        whole_fraction=floor_seconds / whole,
        peak_bytes=peak,
    )


def _floor_bytes(policy: Policy, counts: list[tuple[int, int]]) -> float:
    """What decoding must move for so many tokens in and out of each answer."""
    # The first token of an answer belongs to its prompt.
    contexts = sum((new - 1) * length + new * (new - 1) // 2 for length, new in counts)
    steps = max(new for _, new in counts) - 1
    drawn = sum(new - 1 for _, new in counts)
    return Sizes.of(policy).decode_bytes(steps, drawn, contexts)


def _shortened(request: Request) -> Request:
    """The same prompt with a single token to draw."""
    sampling = type(request.sampling)(max_new_tokens=1, ignore_stop=True)
    return Request(id=request.id, tokens=request.tokens, keys=request.keys, sampling=sampling)
