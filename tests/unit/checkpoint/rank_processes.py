"""Two ranks in processes of their own, called as a controller calls them, without Ray."""

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.checkpoint import file_writers
from luyen.checkpoint.shards import write_shard
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.actor import ActorEngine, prepare_update
from luyen.engine.batch import MicroBatching, split_batch
from luyen.engine.fsdp import join_ranks, shard
from luyen.engine.optim import MasterOptimizer
from luyen.runtime.worker import TrainWorker
from tests.tiny_models import tiny_policy
from tests.unit.engine.fsdp_cases import recorded
from tests.worlds import forks

WORLD = 2


class Rank:
    """What a rank does when it is called: all that its roles do, and a few things for tests."""

    def __init__(self, rank: int, address: str) -> None:
        torch.set_num_threads(1)
        mesh = join_ranks(rank, WORLD, address, timeout_s=60)
        policy = tiny_policy("llama", seed=1)
        shard(policy, mesh)
        optimizer = MasterOptimizer(policy.parameters(), OptimConfig(lr=1e-2))
        actor = ActorEngine(policy, optimizer, MicroBatching(max_tokens=64), temperature=1.0)
        self.roles = TrainWorker(rank=rank, actor=actor, reference=None, critic=None)
        self.rank = rank
        self.gate = threading.Event()
        self.gate.set()
        self.events: list[str] = []
        self.is_full = False
        file_writers.write_shard = self._write_shard

    def _write_shard(self, file: Path, tensors: Any) -> None:
        assert self.gate.wait(60)
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.events.append("written")
        write_shard(file, tensors)

    def learn(self, step: int) -> None:
        """One step on a recorded batch."""
        objective = Objective(loss="vanilla")
        batch, numbers = prepare_update(recorded(step), objective, {})
        share = split_batch(batch, MicroBatching(max_tokens=64), ranks=WORLD)[self.rank]
        self.roles.update_actor(share, objective=objective, lr=1e-2, statistics=numbers)
        self.events.append("learned")

    def hold(self, is_held: bool) -> None:
        """Keep every file of tensors from being written, or let them go on."""
        self.gate.clear() if is_held else self.gate.set()

    def heard(self) -> list[str]:
        """What happened so far."""
        return self.events

    def fill_disk(self, is_full: bool) -> None:
        """From now on files find no room, or find it again."""
        self.is_full = is_full

    def has_ended(self) -> bool:
        """Whether nothing is being written, however it ended."""
        try:
            return self.roles.is_written()
        except UserError:
            return True

    def die(self) -> None:
        """End at once."""
        os._exit(1)


def serve(line: Connection, rank: int, address: str) -> None:
    """Carry out what comes over the line."""
    here = Rank(rank, address)
    while True:
        method, arguments = line.recv()
        owner = here if method in vars(Rank) else here.roles
        try:
            line.send((getattr(owner, method)(*arguments), None))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            line.send((None, error))


class RankProcesses:
    """Calls both ranks, as `luyen.runtime.ray.ranks.RankGroup` does; a dead one is an EOFError."""

    def __init__(self, folder: Path) -> None:
        context = forks()
        self.processes: list[Any] = []
        self.lines: list[Connection] = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, f"file://{folder}/meeting"), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines.append(ours)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        return self.some(range(WORLD), method, *arguments)

    def some(self, ranks: Any, method: str, *arguments: Any) -> list[Any]:
        for rank in ranks:
            self.lines[rank].send((method, arguments))
        answers = [self.lines[rank].recv() for rank in ranks]
        for _, error in answers:
            if error is not None:
                raise error
        return [value for value, _ in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
