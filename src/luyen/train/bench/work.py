"""What is measured: prompts of given lengths, answers of given lengths, the same every time."""

from dataclasses import dataclass
from typing import final

import torch

from luyen.base.seeds import derive_key
from luyen.rollout.protocol import Request, Sampling


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts and answers of a measurement; lengths are spread evenly at random over a range.

    Example:
        >>> [len(r.tokens) for r in Work(prompts=2, prompt=(5, 5), new=(3, 3)).requests(100)]
        [5, 5]
    """

    prompts: int = 256
    """Prompts."""
    samples: int = 1
    """Answers to each."""
    prompt: tuple[int, int] = (256, 256)
    """Least and most tokens of a prompt."""
    new: tuple[int, int] = (256, 256)
    """Least and most tokens of an answer; no answer stops before."""
    seed: int = 0
    """Decides tokens and lengths."""

    @property
    def longest(self) -> int:
        """Most tokens a sequence can have."""
        return self.prompt[1] + self.new[1]

    def requests(self, vocabulary: int) -> list[Request]:
        """One request a prompt."""
        generator = torch.Generator().manual_seed(self.seed)

        def between(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        found: list[Request] = []
        for index in range(self.prompts):
            length, new = between(*self.prompt), between(*self.new)
            tokens = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
            keys = (derive_key(self.seed, "bench", index, i) for i in range(self.samples))
            sampling = Sampling(max_new_tokens=new, ignore_stop=True)
            found.append(
                Request(id=f"{index}", tokens=tuple(tokens), keys=tuple(keys), sampling=sampling)
            )
        return found
