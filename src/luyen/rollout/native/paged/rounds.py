"""Draws on their way from the device to the host."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.rollout.native.paged.seats import Seat
from luyen.rollout.native.paged.state import RowState
from luyen.rollout.native.running import Decode
from luyen.rollout.protocol import Ending


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """Draws that were launched and have not been read.

    Example:
        Made by `bring` for every round of decode steps.
    """

    seats: list[Seat]
    """Whose they are, by column."""
    tokens: Tensor
    """`[steps, rows]` on the host once `ready`."""
    logps: Tensor
    """Their log-probabilities."""
    kept: Tensor | None
    """Mass that truncation left, if any row truncates."""
    ready: torch.cuda.Event | None
    """When the device has written them; None: they are there."""

    def read(self, decode: Decode) -> list[tuple[Seat, Ending]]:
        """Append the draws to their rows; the seats whose rows ended, and why.

        What a row drew after its end, or after it was sent back to wait, is dropped.
        """
        if self.ready is not None:
            self.ready.synchronize()
        tokens, logps = self.tokens.T.tolist(), self.logps.T.tolist()
        kept = self.kept.T.tolist() if self.kept is not None else None
        ended: list[tuple[Seat, Ending]] = []
        for column, seat in enumerate(self.seats):
            if seat.is_over:
                continue
            masses = kept[column] if kept is not None else None
            reason = seat.row.extend(tokens[column], logps[column], masses, decode)
            if reason is not None:
                ended.append((seat, reason))
        return ended


def bring(
    state: RowState, seats: list[Seat], here: slice, count: int, *, is_truncated: bool
) -> Round:
    """Ask for the results of the last `count` steps; nothing waits for them here."""
    outs = [state.out_tokens, state.out_logps, *([state.out_kept] if is_truncated else [])]
    ready = None
    if state.tokens.is_cuda:
        found = [out[:count, here].to("cpu", non_blocking=True) for out in outs]
        ready = torch.cuda.Event()
        ready.record()
    else:
        found = [out[:count, here].clone() for out in outs]
    return Round(
        seats=seats,
        tokens=found[0],
        logps=found[1],
        kept=found[2] if is_truncated else None,
        ready=ready,
    )
