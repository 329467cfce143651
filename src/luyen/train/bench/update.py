"""How fast the policy learns: an optimizer step on recorded answers, and a whole GRPO step."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from luyen.algorithms.advantages.group import grpo
from luyen.algorithms.advantages.inputs import CreditInputs
from luyen.algorithms.objective import Objective
from luyen.config.schema.optim import Optim
from luyen.config.schema.rollout import Rollout
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import PackedBatch, flat_tensor, pack
from luyen.engine.optim import MasterAdamW
from luyen.engine.passes import Passes
from luyen.models.policy import Policy
from luyen.models.sharing import share_prompts
from luyen.rollout.engines import native
from luyen.rollout.protocol import Completion, Request, RolloutEngine, generate
from luyen.train.bench.roofline import Ceilings, Sizes, peak_bytes, reset_peak, wait
from luyen.train.bench.work import Work

_RATE = 1e-6
Answers: TypeAlias = Mapping[tuple[str, int], Completion]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What was measured.

    Example:
        Made by `measure_step`, shown by `luyen bench train` and `luyen bench step`.
    """

    tokens: int
    """Tokens of all sequences, prompts counted for every answer."""
    computed: int
    """Tokens the model computed: a shared prompt counts once."""
    generate_seconds: float
    """Answers drawn."""
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
    work: Work,
    ceilings: Ceilings,
    *,
    rollout: Rollout,
    max_tokens: int,
    rounds: int = 3,
) -> StepFigures:
    """Medians of several GRPO steps after one that warms up."""
    asked = work.requests(policy.head.vocabulary)
    engine = native(policy, rollout, longest=work.longest, decode=lambda _: "")
    optimizer = MasterAdamW(policy.parameters(), Optim(lr=_RATE))
    actor = ActorEngine(policy, optimizer, Passes(max_tokens=max_tokens), temperature=1.0)
    reset_peak(policy.device.type)
    steps = [_take_step(actor, engine, asked) for _ in range(rounds + 1)]
    peak = peak_bytes(policy.device.type)
    engine.close()
    optimizer.release()
    batch = steps[-1].batch
    computed = share_prompts(batch.tokens, batch.lengths, batch.layout.mask).first.numel()
    floor = Sizes.of(policy).update_flops(computed) / ceilings.flops_per_second
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
    """One step as it went.

    Example:
        Made by `_take_step`.
    """

    generate_seconds: float
    """Answers drawn."""
    update_seconds: float
    """Everything after them."""
    gap: float
    """Largest difference of log-probabilities."""
    batch: PackedBatch
    """What was learned from."""


def _take_step(actor: ActorEngine, engine: RolloutEngine, asked: list[Request]) -> _Step:
    device = actor.policy.device
    start = time.perf_counter()
    found = generate(engine, asked)
    wait(device.type)
    drawn = time.perf_counter()
    batch = _batch(asked, found, device)
    done = actor.update(batch, Objective(loss="vanilla", knobs={}), lr=_RATE, seed=0)
    wait(device.type)
    return _Step(
        generate_seconds=drawn - start,
        update_seconds=time.perf_counter() - drawn,
        gap=done.metrics["parity/max_gap"],
        batch=batch,
    )


def _batch(asked: list[Request], found: Answers, device: torch.device) -> PackedBatch:
    """Every answer with its prompt, an advantage, and what the sampler said of it."""
    prompts = {request.id: (index, request.tokens) for index, request in enumerate(asked)}
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
