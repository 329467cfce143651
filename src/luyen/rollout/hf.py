"""Plain Hugging Face generation: the model's own attention and cache, one prompt after the other.

Slow and simple on purpose. It serves architectures the embedded engine cannot, and it checks that
engine: both draw with the same numbers, so greedy tokens and log-probabilities can be compared.
"""

from collections import deque
from typing import final

import torch

from luyen.models.fingerprint import Fingerprint
from luyen.models.plain import PlainForward, plain_attention
from luyen.models.policy import Policy
from luyen.rollout.native.running import Decode, Row, RowTensors, write_down
from luyen.rollout.native.sample import draw, uniforms
from luyen.rollout.protocol import Completion, Request, refuse_impossible


@final
class HfEngine:
    """Answers one request at a time through the model's own forward."""

    def __init__(self, policy: Policy, *, decode: Decode | None = None) -> None:
        """`decode` turns tokens into text; without it, requests with stop strings are refused."""
        self._policy = policy
        self._decode = decode
        self._waiting: deque[list[Row]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._waiting

    @property
    def is_steady(self) -> bool:
        """No: the samples of a request share their matrix products."""
        return False

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        vocabulary = self._policy.head.vocabulary
        refuse_impossible(request, vocabulary=vocabulary, can_decode=self._decode is not None)
        self._waiting.append([Row(request, i) for i in range(len(request.keys))])

    @torch.no_grad()
    def advance(self) -> list[Completion]:
        """Answer the next request in full."""
        if not self._waiting:
            return []
        with plain_attention(self._policy):
            return self._answer(self._waiting.popleft())

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Drop a request that waits, or one sample of it."""
        dropped = [row for rows in self._waiting for row in rows if row.is_meant(request, sample)]
        left = ([row for row in rows if row not in dropped] for rows in self._waiting)
        self._waiting = deque(rows for rows in left if rows)
        return [row.completion("aborted") for row in dropped]

    def fingerprint(self) -> Fingerprint:
        """The very parameters of the policy."""
        return Fingerprint.of(self._policy)

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _answer(self, rows: list[Row]) -> list[Completion]:
        """Every sample runs until the last one has ended; what an ended one draws is dropped."""
        request = rows[0].request
        device = self._policy.device
        settings = RowTensors.of(rows, vocabulary=self._policy.head.vocabulary, device=device)
        tokens = torch.tensor([request.tokens] * len(rows), device=device)
        forward = PlainForward(self._policy)
        done: dict[int, Completion] = {}
        for position in range(request.sampling.max_new_tokens):
            logits = forward.logits(tokens)
            if settings.temperature is not None:
                logits = logits / settings.temperature
            counter = torch.full((len(rows),), position, device=device)
            drawn = draw(logits, uniforms(settings.keys, counter), settings.greedy, settings.limits)
            write_down(rows, drawn)
            for i, row in enumerate(rows):
                reason = row.ending(self._decode) if i not in done else None
                if reason is not None:
                    done[i] = row.completion(reason)
            if len(done) == len(rows):
                break
            tokens = drawn.tokens[:, None]
        return [done[i] for i in range(len(rows))]
