"""Requests to ask of an engine, and what a plain or packed forward says of its answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luyen.base.seeds import derive_key
from luyen.models.hf_generation import hf_attention
from luyen.models.policy import Policy
from luyen.models.prepacked_linear import PrepackedLinears
from luyen.rollout.hf_engine import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.native.paged.engine import PagedEngine
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling

ENGINES = ("native", "hf", "paged")


def spell(tokens: Sequence[int]) -> str:
    """A character per token: `a` is 0, `b` is 1, ..."""
    return "".join(chr(ord("a") + token) for token in tokens)


def holds_copies(linears: PrepackedLinears) -> bool:
    """Whether packed copies of weights take memory now."""
    return any(copy is not None for copy in linears._copies)


def native(
    policy: Policy, *, rows: int = 8, tokens: int = 2048, longest: int = 2048, **options: Any
):
    """The embedded engine with these limits, as this device has it."""
    if policy.device.type == "cuda":
        return paged(policy, rows=rows, tokens=tokens, longest=longest, **options)
    return NativeEngine(
        policy,
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        decode=spell,
        **options,
    )


def paged(
    policy: Policy,
    *,
    rows: int = 8,
    tokens: int = 2048,
    longest: int = 2048,
    pages: int | None = None,
    is_eager: bool = False,
    is_open: bool = False,
    enable_prefix_caching: bool = True,
):
    """The embedded engine over pages; on a CPU it runs without graphs."""
    return PagedEngine(
        policy,
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        gpu_memory_utilization=0.5,
        enforce_eager=is_eager,
        decode=spell,
        most_pages=pages,
        is_open=is_open,
        enable_prefix_caching=enable_prefix_caching,
    )


def engine_of(name: str, policy: Policy) -> RolloutEngine:
    """An engine by its name."""
    if name == "hf":
        return HfEngine(policy, decode=spell)
    return native(policy) if name == "native" else paged(policy)


def prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, 60, (length,), generator=generator).tolist())


def request(
    length: int, new: int, *, name: str | None = None, samples: int = 1, seed: int = 0, **sampling
) -> Request:
    """Answers to a random prompt; the name decides the random numbers."""
    name = name or f"r{length}"
    keys = tuple(derive_key(seed, "test", name, i) for i in range(samples))
    asked = Sampling(max_new_tokens=new, **sampling)
    return Request(id=name, tokens=prompt(length, seed=seed), keys=keys, sampling=asked)


@dataclass(frozen=True)
class Ladder:
    """A constraint: one of the three tokens after the last, or from 4 on the stop token.

    After `steps` tokens nothing may follow.
    """

    size: int
    steps: int = 12
    stop: int = 9

    def start(self) -> "LadderState":
        return LadderState(self)


class LadderState:
    def __init__(self, rule: Ladder) -> None:
        self.rule = rule
        self.tokens: list[int] = []

    def allowed(self) -> Tensor:
        found = torch.zeros(self.rule.size, dtype=torch.bool)
        last = self.tokens[-1] if self.tokens else 10
        for step in (1, 2, 3):
            found[10 + (last - 10 + step) % (self.rule.size - 10)] = True
        found[self.rule.stop] = len(self.tokens) >= 4
        return found

    def accept(self, token: int) -> None:
        assert self.allowed()[token]
        assert not self.is_finished
        self.tokens.append(token)

    @property
    def is_finished(self) -> bool:
        ended = bool(self.tokens) and self.tokens[-1] == self.rule.stop
        return ended or len(self.tokens) >= self.rule.steps


Pair = tuple[tuple[int, ...], Completion]


def pairs(requests: Iterable[Request], found: Mapping[tuple[str, int], Completion]) -> list[Pair]:
    """(prompt, answer) of every completion."""
    prompts = {request.id: request.tokens for request in requests}
    return [(prompts[name], done) for (name, _), done in found.items()]


def sampled_logps(answers: Sequence[Pair]) -> Tensor:
    """What the engine said."""
    return torch.tensor([logp for _, done in answers for logp in done.logps])


def packed_logps(policy: Policy, answers: Sequence[Pair], *, temperature: float = 1.0) -> Tensor:
    """What the packed training forward says of the same tokens, in one pass."""
    sequences = [before + done.tokens for before, done in answers]
    mask = [i >= len(before) for before, done in answers for i in range(len(before + done.tokens))]
    tokens = torch.tensor([t for sequence in sequences for t in sequence]).to(policy.device)
    lengths = [len(sequence) for sequence in sequences]
    scored = policy(tokens, lengths, torch.tensor(mask).to(policy.device), temperature=temperature)
    return scored.logp.detach().cpu()


@torch.no_grad()
def plain_logits(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """float64 logits after each token, from transformers' own model, on the known vocabulary."""
    with hf_attention(policy):
        ids = torch.tensor([list(tokens)]).to(policy.device)
        logits = policy.model(input_ids=ids).logits[0]
    return logits[:, : policy.head.vocabulary].double().cpu()
