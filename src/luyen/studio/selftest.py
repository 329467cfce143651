"""Self-tests: exactness, random numbers, rendering, and answers equal to transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

from luyen.base.errors import UserError
from luyen.base.process_setup import is_promised
from luyen.base.seeds import derive_key, uniform
from luyen.data.render import Renderer
from luyen.data.renderer_laws import PROBES, broken_laws
from luyen.models.policy import Policy
from luyen.rollout.hf_engine import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.native.sampler import uniforms
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling, generate

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Allowed difference of log-probabilities between two implementations."""
_SPLITS = "prefix extension"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """The result of one self-test.

    Example:
        >>> SelfTestResult(name="random numbers", state="ok", detail="equal").state
        'ok'
    """

    name: str
    """What was tried."""
    state: Literal["ok", "note", "failed"]
    """`note`: a limitation that does not break a guarantee."""
    detail: str
    """What was found."""


def random_numbers() -> SelfTestResult:
    """Uniforms of the tensor code equal those of the plain Python code, bit for bit."""
    keys = [derive_key(seed, "selftest", seed * 7) for seed in range(200)]
    places = [0, 1, 2, 63, 1000, 2**31]
    signed = [k - (1 << 64) if k >= 1 << 63 else k for k in keys]
    grid = uniforms(torch.tensor(signed)[:, None], torch.tensor(places)[None, :]).tolist()
    wrong = sum(
        grid[i][j] != uniform(key, place)
        for i, key in enumerate(keys)
        for j, place in enumerate(places)
    )
    detail = f"{len(keys) * len(places)} numbers, {wrong} differ between Python and torch"
    return SelfTestResult(name="random numbers", state="failed" if wrong else "ok", detail=detail)


def exactness(
    policy: Policy, prompts: Sequence[Sequence[int]], *, threads: int, rows: int, new: int = 24
) -> SelfTestResult:
    """Log-probabilities of the sampler equal those of the packed training forward, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gap, count = _parity(policy, prompts, rows=rows, new=new)
    finally:
        torch.set_num_threads(before)
    dtype = next(policy.parameters()).dtype
    promised = is_promised(str(dtype).removeprefix("torch."))
    lengths = f"prompts of {min(map(len, prompts))}-{max(map(len, prompts))} tokens"
    many = f"{threads} thread{'' if threads == 1 else 's'}"
    name = f"exactness, {many}, {rows} row{'' if rows == 1 else 's'} at once"
    if gap == 0:
        return SelfTestResult(
            name=name, state="ok", detail=f"{count} tokens, {lengths}: largest gap 0"
        )
    state = "failed" if promised and policy.device.type == "cpu" else "note"
    return SelfTestResult(
        name=name, state=state, detail=f"approximate: gap {gap:.2g}, {count} tokens"
    )


def _parity(
    policy: Policy, prompts: Sequence[Sequence[int]], *, rows: int, new: int
) -> tuple[float, int]:
    """Largest gap, and how many tokens were compared; sequences are packed in reverse order."""
    sampling = Sampling(max_new_tokens=new, ignore_stop=True)
    found = _answers(_native(policy, prompts, new, rows), prompts, sampling, samples=2)
    sequences = [([*prompts[int(name)], *done.tokens], done) for (name, _), done in found.items()]
    sequences.reverse()
    gap, count = 0.0, 0
    for start in range(0, len(sequences), 5):
        part = sequences[start : start + 5]
        lengths = [len(tokens) for tokens, _ in part]
        mask = [i >= len(tokens) - new for tokens, _ in part for i in range(len(tokens))]
        tokens = torch.tensor([t for some, _ in part for t in some], device=policy.device)
        with torch.no_grad():
            scored = policy(tokens, lengths, torch.tensor(mask, device=policy.device)).logp
        sampled = torch.tensor([logp for _, done in part for logp in done.logps])
        gap = max(gap, float((scored.cpu() - sampled).abs().max()))
        count += len(sampled)
    return gap, count


def renderer_laws(renderer: Renderer) -> list[SelfTestResult]:
    """The laws of rendering for built-in probe conversations."""
    found: list[SelfTestResult] = []
    for name, messages in PROBES.items():
        try:
            broken = broken_laws(renderer, messages)
        except UserError as error:
            found.append(SelfTestResult(name=f"rendering, {name}", state="note", detail=error.why))
            continue
        # A template that rewrites earlier turns costs speed, not correctness: the rollout is split.
        is_harmless = all(violation.law == _SPLITS for violation in broken)
        state = "ok" if not broken else "note" if is_harmless else "failed"
        detail = "; ".join(map(str, broken)) or "every law holds"
        found.append(SelfTestResult(name=f"rendering, {name}", state=state, detail=detail))
    return found


def same_answers(
    policy: Policy, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], *, new: int = 24
) -> SelfTestResult:
    """Greedy tokens of `native` equal those of plain transformers; log-probabilities are near."""
    sampling = Sampling(max_new_tokens=new, temperature=0.0, stop_ids=stop_ids)
    ours = _answers(_native(policy, prompts, new, len(prompts)), prompts, sampling, samples=1)
    theirs = _answers(HfEngine(policy), prompts, sampling, samples=1)
    limit = _TOLERANCE[next(policy.parameters()).dtype]
    gaps, parted = [0.0], 0
    for key, mine in ours.items():
        shared = _shared(mine, theirs[key])
        parted += shared < max(len(mine.tokens), len(theirs[key].tokens))
        # Where they part, the two likeliest tokens must be about equally likely.
        pairs = zip(mine.logps[: shared + 1], theirs[key].logps[: shared + 1], strict=False)
        gaps += [abs(a - b) for a, b in pairs]
    tokens = sum(len(done.tokens) for done in ours.values())
    words = "equal greedy tokens" if not parted else f"{parted} answers part at a tie"
    detail = f"{tokens} tokens, {words}, log-probs differ by at most {max(gaps):.2g}"
    is_near = max(gaps) <= limit
    state = "failed" if not is_near else "note" if parted else "ok"
    return SelfTestResult(name="native against hf", state=state, detail=detail)


def _shared(a: Completion, b: Completion) -> int:
    pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))


def _native(policy: Policy, prompts: Sequence[Sequence[int]], new: int, rows: int) -> RolloutEngine:
    longest = max(map(len, prompts)) + new
    return NativeEngine(
        policy,
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=max(longest, 512),
        decode=lambda _: "",
    )


def _answers(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sampling, *, samples: int
) -> dict[tuple[str, int], Completion]:
    requests = [
        Request(
            id=str(i),
            tokens=tuple(prompt),
            keys=tuple(derive_key(0, "selftest", i, sample) for sample in range(samples)),
            sampling=sampling,
        )
        for i, prompt in enumerate(prompts)
    ]
    return generate(engine, requests)
