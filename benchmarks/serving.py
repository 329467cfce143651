"""The embedded engine as a server drives it: a new request for each that ends.

Prompts differ in text and length, answers in length; every token is looked up with `snapshot`, as
it would be streamed. Tokens are counted while all rows are in use: from the end of so many requests
as run at once, until the last one is submitted.

    python benchmarks/serving.py --model ~/.cache/luyen/models/smollm2-135m --dtype bfloat16 \
        --threads 2 --concurrent 32 --requests 96
    python benchmarks/serving.py --shape qwen2.5-1.5b --device cuda --concurrent 256 \
        --requests 1024 --prompt-tokens 100 1024 --new-tokens 100 1024
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles

import torch

from luyen.base.process_setup import prepare_process
from luyen.base.seeds import derive_key, uniform
from luyen.config.schema.actor_rollout_ref import MultiTurnConfig, RolloutConfig
from luyen.config.schema.model import ModelConfig
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.models.load import load_policy
from luyen.models.policy import Policy
from luyen.models.random_policy import shaped_policy
from luyen.rollout.constraints import json_schema_constraint
from luyen.rollout.engines import native
from luyen.rollout.protocol import Request, Sampling, StreamingEngine, TokenConstraint

SCHEMA = {"type": "array", "items": {"type": "integer"}}


@dataclass
class Stream:
    """What a client has seen of its answer."""

    submitted: float
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    """When each token was seen."""

    def see(self, count: int, now: float) -> None:
        """So many more tokens are there now."""
        self.tokens += count
        self.times += [now] * count


def requests(asked: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Request]:
    """Requests of random lengths, the same ones for the same seed."""
    constraint: TokenConstraint | None = None
    if asked.constrained:
        constraint = json_schema_constraint(SCHEMA, tokenizer)
    for number in range(asked.requests):
        key = derive_key(asked.seed, "serving", number)
        low, high = asked.prompt_tokens
        prompt = low + int(uniform(key, 0) * (high - low + 1))
        tokens = tuple(int(uniform(key, 2 + i) * tokenizer.size) for i in range(prompt))
        low, high = asked.new_tokens
        sampling = Sampling(
            max_new_tokens=low + int(uniform(key, 1) * (high - low + 1)),
            top_p=asked.top_p,
            top_logprobs=asked.top_logprobs,
            ignore_stop=constraint is None,
        )
        yield Request(
            id=f"r{number}", tokens=tokens, keys=(key,), sampling=sampling, constraint=constraint
        )


def look(engine: StreamingEngine, streams: dict[str, Stream]) -> None:
    """Read what is new of every sample."""
    now = time.perf_counter()
    for name, stream in streams.items():
        found = engine.snapshot(name, 0, start=stream.tokens)
        if found is not None:
            stream.see(len(found.tokens), now)


def serve(
    engine: StreamingEngine, waiting: list[Request], concurrent: int
) -> tuple[list[Stream], float, float]:
    """All streams, and from when to when every row was in use."""
    running: dict[str, Stream] = {}
    done: list[Stream] = []
    begin = end = 0.0
    while waiting or running:
        while waiting and len(running) < concurrent:
            request = waiting.pop(0)
            engine.submit(request)
            running[request.id] = Stream(submitted=time.perf_counter())
            end = time.perf_counter()
        for completion in engine.advance():
            stream = running.pop(completion.request)
            stream.see(len(completion.tokens) - stream.tokens, time.perf_counter())
            done.append(stream)
            begin = time.perf_counter() if len(done) == concurrent else begin
        look(engine, running)
    return done, begin, end


def report(streams: list[Stream], begin: float, end: float) -> None:
    """Tokens a second, and the waits of single users."""
    times = [one.times for one in streams if one.submitted >= begin]
    count = sum(begin <= time < end for one in streams for time in one.times)
    waits = [one.times[0] - one.submitted for one in streams if one.submitted >= begin]
    gaps = [after - before for one in times for before, after in pairwise(one)]
    print(f"{count / (end - begin):.1f} tokens/s over {end - begin:.1f} s, {len(times)} requests")
    for name, values in (("first token", waits), ("between tokens", gaps)):
        parts = quantiles(values, n=20)
        print(f"{name}: median {parts[9]:.3f} s, 95 % within {parts[18]:.3f} s")


def policy_of(asked: argparse.Namespace, tokenizer: Tokenizer) -> Policy:
    """The model, or random weights in a known shape."""
    if asked.shape:
        dtype = getattr(torch, asked.dtype)
        return shaped_policy(asked.shape, dtype=dtype, device=asked.device).eval()
    model = ModelConfig(path=asked.model, dtype=asked.dtype)
    return load_policy(model, device=asked.device, vocabulary=tokenizer.size).eval()


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin://arithmetic")
    parser.add_argument("--shape", help="random weights in this shape instead of a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loose", action="store_true", help="without exact log-probabilities")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 256))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 128))
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-logprobs", type=int, default=0)
    parser.add_argument("--constrained", action="store_true", help="answers are lists of integers")
    parser.add_argument("--profile", action="store_true", help="print where the time went")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    prepare_process()
    torch.set_num_threads(asked.threads)
    tokenizer = load_tokenizer(asked.model)
    longest = asked.prompt_tokens[1] + asked.new_tokens[1]
    rollout = RolloutConfig(
        max_num_seqs=asked.concurrent,
        max_num_batched_tokens=max(8192, longest),
        multi_turn=MultiTurnConfig(enable=True),
        deterministic=not asked.loose,
    )
    engine = native(policy_of(asked, tokenizer), rollout, longest=longest, decode=tokenizer.decode)
    assert isinstance(engine, StreamingEngine)
    if asked.device == "cuda":  # kernels are compiled and graphs captured before the clock runs
        serve(engine, list(requests(asked, tokenizer))[: asked.concurrent], asked.concurrent)
    waiting = list(requests(asked, tokenizer))
    start = time.perf_counter()
    profile = cProfile.Profile()
    if asked.profile:
        profile.enable()
    found = serve(engine, waiting, asked.concurrent)
    profile.disable()
    whole = time.perf_counter() - start
    print(
        f"{sum(one.tokens for one in found[0]) / whole:.1f} tokens/s over the whole {whole:.1f} s"
    )
    report(*found)
    if asked.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
