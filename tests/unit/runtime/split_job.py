"""A rank of an engine that ranks share: what it generates, and what the trainer says of that."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.engine.fsdp import leave_ranks, take_apart
from luyen.engine.tensor_parallel import divide_layers
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy
from luyen.models.weights import trained_parameters
from luyen.rollout.protocol import Completion, Request, generate
from luyen.runtime.split_engine import EngineRanks
from luyen.runtime.training import RankPlace
from luyen.runtime.weights import digests_of, load_weights
from tests.generation import Ladder, native, request
from tests.tiny_models import DEVICE, VOCABULARY, tiny_net
from tests.unit.engine.fsdp_job import claim_host

Found = dict[tuple[str, int], Completion]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and how its engine is made."""

    kind: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


def requests() -> list[Request]:
    """Greedy, drawn, truncated and constrained ones, some of which share a prompt."""
    greedy = [request(9, 12, name=f"greedy {i}", seed=i, temperature=0.0) for i in range(4)]
    return [
        *greedy,
        request(40, 10, name="drawn", samples=3),
        request(40, 10, name="warm", temperature=0.7, top_logprobs=3),
        request(7, 10, name="truncated", samples=2, top_k=9, top_p=0.9, min_p=0.01),
        replace(request(5, 12, name="constrained"), constraint=Ladder(VOCABULARY)),
    ]


def make_policy(shape: Shape, *, seed: int = 0, on_host: bool = False) -> Policy:
    net = tiny_net(shape.kind, seed=seed, initializer_range=0.1, **shape.model)
    net.to(device="cpu" if on_host else DEVICE)
    if shape.lora_rank:
        add_adapter(net, ModelConfig(path="", lora_rank=shape.lora_rank))
        for index, (name, parameter) in enumerate(net.named_parameters()):
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(100 * seed + index)
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.05 * drawn)
    place = torch.device(DEVICE) if on_host else None
    return Policy(net, vocabulary=VOCABULARY, device=place).eval()


def later_weights(shape: Shape) -> dict[str, Tensor]:
    """Other values of what learns, on the host."""
    own = trained_parameters(make_policy(shape))
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor.cpu() + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in own.items()
    }


@torch.no_grad()
def scores(policy: Policy, found: Mapping[tuple[str, int], Completion]) -> dict[str, Tensor]:
    """Log-probabilities of all answers, packed by temperature, as the trainer computes them."""
    asked = {r.id: r for r in requests()}
    told: dict[str, Tensor] = {}
    for temperature in (1.0, 0.7):
        keys = [k for k in found if (asked[k[0]].sampling.temperature or 1.0) == temperature]
        sequences = [(*asked[k[0]].tokens, *found[k].tokens) for k in keys]
        lengths = [len(one) for one in sequences]
        mask = torch.cat(
            [
                torch.arange(len(one)) >= len(asked[k[0]].tokens)
                for k, one in zip(keys, sequences, strict=True)
            ]
        )
        tokens = torch.tensor([t for one in sequences for t in one])
        scored = policy(tokens.to(DEVICE), lengths, mask.to(DEVICE), temperature=temperature)
        parts = scored.logp.cpu().split([len(found[k].tokens) for k in keys])
        told |= {f"{name} {i}": part for (name, i), part in zip(keys, parts, strict=True)}
    return told


def alone(shape: Shape) -> dict[str, Any]:
    """What one process generates, before and after new weights."""
    policy = make_policy(shape)
    engine = native(policy, **shape.engine)
    first = generate(engine, requests())
    load_weights(engine, later_weights(shape))
    return {"first": first, "then": generate(engine, requests()), "digests": digests_of(engine)}


def be_rank(root: Path, world: int, rank: int, shapes: dict[str, Shape]) -> None:
    """A rank of a world for each shape."""
    torch.set_num_threads(1)
    claim_host(rank)
    for index, (name, shape) in enumerate(shapes.items()):
        address = f"file://{root}/meeting_{world}_{index}"
        place = RankPlace(device=DEVICE, rank=rank, ranks=world, address=address, timeout_s=60)
        found = run(shape, EngineRanks(place), root / f"{name}_{world}_tokens.pt")
        if rank == 0:
            torch.save(found, root / f"{name}_{world}.pt")
        leave_ranks()


def run(shape: Shape, ranks: EngineRanks, told: Path) -> dict[str, Any]:
    """On the first rank all there is to know; the trainer's ranks are the same processes."""
    policy = make_policy(shape, on_host=True)
    ranks.divide(policy)
    engine = ranks.add(native(policy, **shape.engine), policy)
    found: dict[str, Any] = {}
    if ranks.rank == 0:
        found = {"bytes": sum(p.to_local().nbytes for p in trained_parameters(policy).values())}
        found["first"] = generate(engine, requests())
        aborted = request(9, 12, name="aborted", samples=2)
        engine.submit(aborted)
        engine.advance()
        found["aborted"] = engine.abort("aborted")
        load_weights(engine, later_weights(shape))
        found["digests"] = digests_of(engine)
        found["then"] = generate(engine, requests())
        found["is_batch_invariant"] = engine.is_batch_invariant
        engine.close()
        torch.save(found["first"], told)
        ranks.end()
    else:
        ranks.follow()
    trainer = make_policy(shape)
    take_apart(trainer)
    divide_layers(trainer, ranks.mesh)
    found["scores"] = scores(trainer, torch.load(told, weights_only=False))
    return found


def stop_a_rank(root: Path, rank: int) -> None:
    """Two ranks, of which the second has another weight, and then stands still."""
    torch.set_num_threads(1)
    claim_host(rank)
    place = RankPlace(device=DEVICE, rank=rank, ranks=2, address=f"file://{root}/m", timeout_s=5)
    ranks = EngineRanks(place)
    policy = make_policy(Shape(), on_host=True)
    ranks.divide(policy)
    engine = ranks.add(native(policy), policy)
    other = root / "process_id"
    if rank == 1:
        copied = next(p for n, p in trained_parameters(policy).items() if "norm" in n)
        copied.data.add_(1.0)
        other.write_text(str(os.getpid()))
        with suppress(RuntimeError):  # the first rank is gone
            ranks.follow()
        os._exit(0)
    told: dict[str, Any] = {"weights": _error(lambda: digests_of(engine))}
    engine.submit(request(9, 12))
    engine.advance()
    os.kill(int(other.read_text()), signal.SIGSTOP)
    began = time.monotonic()
    told["advance"] = _error(lambda: [engine.advance() for _ in range(20)])
    told["fingerprint"] = _error(engine.fingerprint)
    told["seconds"] = time.monotonic() - began
    torch.save(told, root / "told.pt")
    os.kill(int(other.read_text()), signal.SIGKILL)
    os._exit(0)


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except (RuntimeError, UserError) as error:
        return str(error)
    return ""
