"""An embedded rollout engine that several ranks share, each with a part of every layer.

Every rank has the whole engine: requests, rows, plan of passes, and the keys and values of its own
heads. The first rank is called and sends each call to the other ranks before it makes it itself.
What an engine does next depends on its requests and on the tokens so far; tokens are sampled on
every rank from the logits of all ranks, joined in the order of the vocabulary, with the same
uniform numbers. So no plan is broadcast; a check of the finished tokens goes with each call.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.engine.fsdp import join_ranks, take_apart
from luyen.engine.sharded_state import merge_sums, shard_sums
from luyen.engine.tensor_parallel import TENSOR, divide_layers, divided_dimension, join_logits
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint, digest_numbers, trained_parameters
from luyen.rollout.protocol import CacheStats, Completion, PrefixCaching, Request, RolloutEngine
from luyen.runtime.monitoring import release_device_memory
from luyen.runtime.training import RankPlace

FIELD = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_IDLE = timedelta(days=365)
"""How long the other ranks wait for a call: no request comes while a policy learns."""
_EXACT_RANKS = 2
"""More parts are added in an order that depends on the place of a number in the batch."""
_LOAD, _SUMS, _END = "load", "sums", "end"


@final
class EngineRanks:
    """The ranks of one replica, as one of them sees them; joins when it is made."""

    def __init__(
        self, place: RankPlace, *, faulty: Callable[[BaseException], object] = lambda _: None
    ) -> None:
        """`faulty` hears of an error of a pass on the first rank before it is raised."""
        assert place.address is not None, "ranks meet somewhere"
        mesh = join_ranks(
            place.rank,
            place.ranks,
            place.address,
            device=place.device,
            tensor_size=place.ranks,
            timeout_s=place.timeout_s,
        )
        self.rank, self.size = place.rank, place.ranks
        self.mesh = mesh[TENSOR]
        self.faulty = faulty
        limit = timedelta(seconds=place.timeout_s)
        # A call is sent when the others take it: one that stands still must not hold the first.
        waits = limit if place.rank == 0 else _IDLE
        self._calls: Any = dist.new_group(backend="gloo", timeout=waits)
        self._answers: Any = dist.new_group(backend="gloo", timeout=limit)
        self._engines: list[SplitEngine] = []

    def divide(self, policy: Policy) -> None:
        """Keep this rank's part of a policy, in place; its head makes the logits of all ranks."""
        if not policy.is_packed:
            why = "the model was loaded with its own attention, whose heads are not divided"
            raise UserError(FIELD, self.size, why, "set it to 1")
        take_apart(policy)
        join_logits(policy, divide_layers(policy, self.mesh, field=FIELD))
        policy.least = self._least

    def add(self, engine: RolloutEngine, policy: Policy) -> "SplitEngine":
        """An engine of a divided policy; every rank adds the same ones in the same order."""
        split = SplitEngine(self, len(self._engines), engine, policy)
        self._engines.append(split)
        return split

    def send(self, number: int, method: str, arguments: tuple[Any, ...], token_hash: int) -> None:
        """Send a call of the first rank to the other ranks."""
        assert self.rank == 0, "only the first rank is called"
        dist.broadcast_object_list([number, method, arguments, token_hash], group=self._calls)

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, on the first one; empty on the other ranks."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, found, group=self._answers)
        return found or []

    def follow(self) -> None:
        """Do what the first rank does, until it ends; on every other rank."""
        while True:
            call: list[Any] = [None] * 4
            dist.broadcast_object_list(call, group=self._calls)
            number, method, arguments, token_hash = call
            if method == _END:
                return
            engine, faults = self._engines[number], list[BaseException]()
            engine.require_same_tokens(token_hash)
            with boundary(faults):
                engine.carry_out(method, arguments)
            # The first rank raises the error of a user too, and goes on or ends with it.
            if faults and not isinstance(faults[0], UserError):
                raise faults[0]

    def end(self) -> None:
        """Let the other ranks return from `follow`; on the first one."""
        self.send(0, _END, (), 0)

    def _least(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._answers)
        return int(found)


@final
class SplitEngine:
    """One engine over all ranks: a rollout engine on the first of them."""

    def __init__(
        self, ranks: EngineRanks, number: int, engine: RolloutEngine, policy: Policy
    ) -> None:
        """`number` is its place among the engines of the ranks."""
        self._ranks = ranks
        self._number = number
        self._engine = engine
        self._policy = policy
        self._token_hash = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self._engine.is_idle

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a completion does not depend on the other sequences in the batch."""
        return self._engine.is_batch_invariant and self._ranks.size <= _EXACT_RANKS

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        self._together("submit", request)

    def advance(self) -> list[Completion]:
        """One pass of every rank; the completions it finished."""
        return self._together("advance")

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; its partial completions."""
        return self._together("abort", request, sample)

    def fingerprint(self) -> Fingerprint:
        """Digests of whole parameters, from the parts of all ranks."""
        parts: list[tuple[Any, dict[str, int]]] = self._together(_SUMS)
        (_, whole), *later = parts
        for rank, (_, copies) in enumerate(later, 1):
            for name, digest in copies.items():
                if digest != whole[name]:
                    why = f"{name} on rank {rank} is not that of the first rank"
                    fix = "find what else writes to its weights"
                    raise UserError("actor_rollout_ref.rollout.name", "native", why, fix)
        return Fingerprint(weights=merge_sums([sums for sums, _ in parts]))

    def load_weights(self, given: Mapping[str, Tensor]) -> None:
        """Give every rank its part of whole parameters."""
        own = trained_parameters(self._policy)
        for name, tensor in given.items():
            mine = own.get(name)
            form = None if mine is None else (mine.dtype, mine.shape)
            if form != (tensor.dtype, tensor.shape):
                why = f"it came as {tensor.dtype} {list(tensor.shape)}, and the engine has {form}"
                fix = "publish the parameters of the model that the engine was built from"
                raise UserError("actor_rollout_ref.rollout.name", name, why, fix)
        self._ranks.send(self._number, _LOAD, (tuple(given),), self._token_hash)
        self._load(tuple(given), given)

    def drop_prefixes(self) -> None:
        """Free what the ranks cached of earlier prompts and answers."""
        if isinstance(self._engine, PrefixCaching):
            self._together("drop_prefixes")

    def cache_stats(self) -> CacheStats:
        """What the prefix cache did so far."""
        return (
            self._engine.cache_stats() if isinstance(self._engine, PrefixCaching) else CacheStats()
        )

    def close(self) -> None:
        """Drop all requests and free the caches of all ranks."""
        self._together("close")

    def require_same_tokens(self, token_hash: int) -> None:
        """A UserError unless this rank finished the same tokens as the first one."""
        if token_hash != self._token_hash:
            why = f"rank {self._ranks.rank} of a replica generated other tokens than the first rank"
            fix = "run its ranks on devices of one kind, or set it to 1"
            raise UserError(FIELD, self._ranks.size, why, fix)

    def carry_out(self, method: str, arguments: Sequence[Any]) -> Any:
        """A call of the first rank, on this rank."""
        if method == _LOAD:
            return self._load(arguments[0], None)
        if method == _SUMS:
            return self._ranks.gather(self._sums())
        found = getattr(self._engine, method)(*arguments)
        if method == "close":
            release_device_memory()
        if method in ("advance", "abort"):
            done: list[Completion] = found
            self._token_hash = hash((self._token_hash, *((c.sample, c.tokens) for c in done)))
        return found

    def _together(self, method: str, *arguments: Any) -> Any:
        faults: list[BaseException] = []
        with boundary(faults):
            self._ranks.send(self._number, method, arguments, self._token_hash)
            return self.carry_out(method, arguments)
        if not isinstance(faults[0], UserError):
            self._ranks.faulty(faults[0])
        raise faults[0]

    @torch.no_grad()
    def _load(self, names: Sequence[str], given: Mapping[str, Tensor] | None) -> None:
        """The first rank has what is given, and every rank gets its part."""
        own = trained_parameters(self._policy)
        for name in names:
            mine: Any = own[name]
            local: Tensor = mine.to_local()
            whole = local if given is None else given[name].to(local.device)
            _scatter(local, whole, divided_dimension(mine), self._ranks)

    @torch.no_grad()
    def _sums(self) -> tuple[dict[str, tuple[str, int]], dict[str, int]]:
        """Parts of the digests, and digests of what is whole on every rank."""
        own: dict[str, Any] = trained_parameters(self._policy)
        copies = {n: t.to_local() for n, t in own.items() if divided_dimension(t) is None}
        return shard_sums(own, is_first=self._ranks.rank == 0), digest_numbers(copies)


def _scatter(local: Tensor, whole: Tensor, dim: int | None, ranks: EngineRanks) -> None:
    """Write this rank's part of what the first rank has whole; with no `dim` all of it."""
    group = ranks.mesh.get_group()
    if dim is None:
        if ranks.rank == 0:
            local.copy_(whole)
        dist.broadcast(local, group=group, group_src=0)
        return
    parts = None
    if ranks.rank == 0:
        parts = [part.contiguous() for part in whole.chunk(ranks.size, dim)]
    dist.scatter(local, parts, group=group, group_src=0)
