"""Ranks that meet, add numbers, and come to grief in ways of their own."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib import import_module

import torch
from torch import Tensor


class Frail:
    """What a rank holds; `who` is the rank that a method is about."""

    def __init__(self, rank: int, ranks: int, address: str) -> None:
        torch.set_num_threads(1)
        self._ranks = import_module("torch.distributed")
        self._ranks.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
        self._rank = rank

    def added(self, number: float) -> float:
        """The sum over all ranks: whoever calls it waits for the others."""
        total = torch.tensor([number])
        self._ranks.all_reduce(total)
        return total.item()

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """What all of them have added up, on the first rank."""
        whole = torch.tensor([self.added(float(self._rank + 1))])
        if self._rank == 0:
            yield {"w": whole}

    def weight_sums(self) -> dict[str, tuple[str, int]]:
        return {"actor/w": ("float32 [1]", self._rank + 1)}

    def killed(self, who: int) -> float:
        if self._rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.added(1.0)

    def killed_later(self, who: int) -> int:
        """One has done its part when it dies; the others only wait."""
        if self._rank == who:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            return 0
        time.sleep(120)
        return 1

    def stopped(self, who: int) -> float:
        while self._rank == who:  # seen once: something let it go on
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.added(1.0)

    def wrong(self, who: int) -> float:
        """One breaks, and the connection to it with it."""
        if self._rank == who:
            self._ranks.destroy_process_group()
            raise ValueError("the plugin of a user is wrong")
        return self.added(1.0)


def frail(rank: int, ranks: int, address: str) -> Frail:
    """A rank of these."""
    return Frail(rank, ranks, address)
