"""Requests to ask of an engine, and what a plain or packed forward says of its answers."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from luyen.base.seeds import derive_key
from luyen.models.plain import plain_attention
from luyen.models.policy import Policy
from luyen.rollout.hf import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling

ENGINES = ("native", "hf")


def spell(tokens: Sequence[int]) -> str:
    """A character per token: `a` is 0, `b` is 1, ..."""
    return "".join(chr(ord("a") + token) for token in tokens)


def native(policy: Policy, *, rows: int = 8, tokens: int = 2048, longest: int = 2048):
    """The embedded engine with these limits."""
    return NativeEngine(
        policy,
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        decode=spell,
    )


def engine_of(name: str, policy: Policy) -> RolloutEngine:
    """An engine by its name."""
    return native(policy) if name == "native" else HfEngine(policy, decode=spell)


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
    tokens = torch.tensor([t for sequence in sequences for t in sequence])
    lengths = [len(sequence) for sequence in sequences]
    return policy(tokens, lengths, torch.tensor(mask), temperature=temperature).logp.detach()


@torch.no_grad()
def plain_logits(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """float64 logits after each token, from transformers' own model, on the known vocabulary."""
    with plain_attention(policy):
        logits = policy.model(input_ids=torch.tensor([list(tokens)])).logits[0]
    return logits[:, : policy.head.vocabulary].double()
