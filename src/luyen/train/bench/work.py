"""What is measured: prompts of given lengths, answers of given lengths, the same every time."""

from dataclasses import dataclass
from random import Random
from typing import final

from luyen.base.seeds import derive_key
from luyen.rollout.protocol import Request, Sampling

_LARGEST_TOKEN = 10_000


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
        """One request a prompt.

        With 256 prompts and lengths of 100 to 1,024, prompts and answers are as long as those of
        nano-vllm's benchmark.
        """
        dice = Random(self.seed)
        largest = min(_LARGEST_TOKEN, vocabulary - 1)
        prompts = [
            tuple(dice.randint(0, largest) for _ in range(dice.randint(*self.prompt)))
            for _ in range(self.prompts)
        ]
        answers = [dice.randint(*self.new) for _ in range(self.prompts)]
        return [
            Request(
                id=f"{index}",
                tokens=tokens,
                keys=tuple(derive_key(self.seed, "bench", index, i) for i in range(self.samples)),
                sampling=Sampling(max_new_tokens=new, ignore_stop=True),
            )
            for index, (tokens, new) in enumerate(zip(prompts, answers, strict=True))
        ]
