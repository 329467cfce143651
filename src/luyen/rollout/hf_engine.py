"""Plain Hugging Face generation: the model's own attention and cache, one prompt at a time.

Slow and simple on purpose. It serves architectures the embedded engine cannot, and it checks that
engine: both use the same random numbers, so tokens and log-probabilities can be compared.
"""

from collections import deque
from typing import final

import torch

from luyen.base.errors import UserError
from luyen.models.hf_generation import HfForward, can_cache, hf_attention
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint
from luyen.rollout.native.sampler import sample_tokens, uniforms
from luyen.rollout.native.sequences import (
    Decode,
    Row,
    RowTensors,
    allowed_tokens,
    append_tokens,
)
from luyen.rollout.protocol import Completion, Request, refuse_impossible


@final
class HfEngine:
    """Answers one request at a time through the model's own forward."""

    def __init__(
        self,
        policy: Policy,
        *,
        decode: Decode | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        """`decode` turns tokens into text; without it, requests with stop strings are refused.

        Samples of a request run in parts of at most `max_num_seqs`, whose prompts together have at
        most `max_num_batched_tokens` tokens; a longer prompt is read alone.
        """
        self._policy = policy
        self._limit = max_model_len
        self._rows_at_once = max_num_seqs
        self._tokens_at_once = max_num_batched_tokens
        self._decode = decode
        self._has_cache: bool | None = None
        self._waiting: deque[list[Row]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._waiting

    @property
    def is_batch_invariant(self) -> bool:
        """No: the samples of a request share their matrix products."""
        return False

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        vocabulary = self._policy.head.vocabulary
        refuse_impossible(request, vocabulary=vocabulary, can_decode=self._decode is not None)
        prompt, new = len(request.tokens), request.sampling.max_new_tokens
        if self._limit is not None and prompt + new > self._limit:
            raise UserError(
                f"request {request.id}",
                f"{prompt} + {new} tokens",
                f"the engine takes sequences of at most {self._limit} tokens (max_model_len)",
                "shorten the prompt, or raise max_model_len",
            )
        rows = [Row(request, i) for i in range(len(request.keys))]
        size = min(
            self._rows_at_once or len(rows),
            max(1, (self._tokens_at_once or prompt * len(rows)) // prompt),
        )
        self._waiting += [rows[i : i + size] for i in range(0, len(rows), size)]

    @torch.no_grad()
    def advance(self) -> list[Completion]:
        """Answer the next request in full, or a part of its samples that runs together."""
        if not self._waiting:
            return []
        with hf_attention(self._policy):
            return self._answer(self._waiting.popleft())

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Drop a request that waits, or one sample of it."""
        dropped = [row for rows in self._waiting for row in rows if row.matches(request, sample)]
        left = ([row for row in rows if row not in dropped] for rows in self._waiting)
        self._waiting = deque(rows for rows in left if rows)
        return [row.completion("aborted") for row in dropped]

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the policy's parameters, which are shared."""
        return Fingerprint.of(self._policy)

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _answer(self, rows: list[Row]) -> list[Completion]:
        """Run all samples until the last one ends; tokens after a sample's end are dropped."""
        request = rows[0].request
        device = self._policy.device
        settings = RowTensors.of(rows, vocabulary=self._policy.head.vocabulary, device=device)
        tokens = torch.tensor([request.tokens] * len(rows), device=device)
        if self._has_cache is None:
            self._has_cache = can_cache(self._policy)
        forward = HfForward(self._policy, has_cache=self._has_cache)
        done: dict[int, Completion] = {}
        for position in range(request.sampling.max_new_tokens):
            logits = forward.logits(tokens)
            if settings.temperature is not None:
                logits = logits / settings.temperature
            counter = torch.full((len(rows),), position, device=device)
            limits = settings.limits_at(counter)
            allowed = allowed_tokens(rows, vocabulary=logits.shape[-1])
            sampled = sample_tokens(
                logits,
                uniforms(settings.keys, counter),
                settings.greedy,
                limits,
                allowed=None if allowed is None else allowed.to(device),
                top=settings.top,
            )
            append_tokens(rows, sampled)
            for i, row in enumerate(rows):
                reason = row.ending(self._decode) if i not in done else None
                if reason is not None:
                    done[i] = row.completion(reason)
            if len(done) == len(rows):
                break
            tokens = sampled.tokens[:, None]
        return [done[i] for i in range(len(rows))]
