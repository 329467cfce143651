"""What one optimizer step of an offline run learns from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from luyen.engine.batch import PackedBatch


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """Rows as tokens, and the numbers beside them: a pure function of the rows.

    Example:
        >>> from luyen.engine.batch import pack
        >>> pair = pack([[1, 2], [1, 3]], masks=[[0, 1], [0, 1]], groups=[0, 0])
        >>> lesson = Lesson(rows=(7,), batch=pair, numbers={"margins": torch.tensor([0.5])})
        >>> sorted(lesson.tensors())
        ['batch/lengths', 'batch/mask', 'batch/tokens', 'margins']
    """

    rows: tuple[int, ...]
    """Places of the rows among the training rows; held-out rows count from -1 downwards."""
    sequences: tuple[int, ...] = ()
    """How many sequences each row makes; empty: one each, or two each where rows are pairs."""
    batch: PackedBatch
    """The sequences that learn, in the order of the rows; a pair is two, the chosen one first."""
    aside: Mapping[str, PackedBatch] = field(default_factory=dict[str, PackedBatch])
    """Sequences that are only scored, by what they are for."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What the rows say besides tokens, a number per row or per sequence, by name."""

    def by_row(self, numbers: Tensor) -> list[Tensor]:
        """Numbers of the sequences, row by row."""
        each = len(numbers) // len(self.rows)
        return list(numbers.split(self.sequences or (each,) * len(self.rows)))

    def to(self, device: torch.device) -> "Lesson":
        """The same lesson on a device."""
        return replace(
            self,
            batch=self.batch.to(device),
            aside={name: batch.to(device) for name, batch in self.aside.items()},
            numbers={name: x.to(device) for name, x in self.numbers.items()},
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything in it but the places of the rows, by name."""
        found = dict(self.numbers)
        for name, batch in {"batch": self.batch, **self.aside}.items():
            found[f"{name}/tokens"], found[f"{name}/mask"] = batch.tokens, batch.layout.mask
            found[f"{name}/lengths"] = torch.tensor(batch.lengths)
            found |= {f"{name}/{key}": stream for key, stream in batch.streams.items()}
        return found
