"""Continuous batching over one policy: prompts are read once a group, rows finish when they finish.

A pass either prefills new prompts or decodes one token for every running row. A row depends only on
its own tokens and key, so neither the limits below nor the order of requests changes a result, nor
what is cached of earlier ones (`luyen.rollout.native.prefix_cache`).
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.process_setup import is_promised
from luyen.models.attention import AttentionContext
from luyen.models.continued_attention import ContinuedContext, ContinuedSequence
from luyen.models.experts import RoutingLog
from luyen.models.packed_attention import KeyValueSink, PackedContext, packed_positions
from luyen.models.policy import Policy
from luyen.models.prepacked_linear import PrepackedLinears
from luyen.models.weights import Fingerprint
from luyen.rollout.native.kv_cache import RowCache, SharedPrefixCache, SlottedCache, can_split
from luyen.rollout.native.prefix_cache import BLOCK, CachedRow, PrefixCache
from luyen.rollout.native.sampler import (
    NextTokens,
    sample_tokens,
    sample_untruncated,
    uniforms,
)
from luyen.rollout.native.sequences import (
    Decode,
    RouteRecord,
    Row,
    RowPart,
    allowed_tokens,
    append_tokens,
)
from luyen.rollout.protocol import (
    CacheStats,
    Completion,
    Ending,
    Request,
    TokenStream,
    refuse_impossible,
)

_ROUTES_FIELD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdmittedPrompt:
    """A prompt that is read now, with those of its rows that fit.

    Example:
        Made by `NativeEngine` for every prompt of a prefill pass.
    """

    rows: list[Row]
    """Samples of it."""
    blocks: list[int]
    """Cached blocks that it begins with."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt."""
        return self.rows[0].request.tokens

    @property
    def known(self) -> int:
        """Tokens that are cached."""
        return BLOCK * len(self.blocks)


@final
class NativeEngine:
    """The embedded engine on CPU; it shares the trainer's weights, possibly in another layout."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode: Decode,
        is_exact: bool | None = None,
        is_open: bool = False,
        enable_prefix_caching: bool = True,
        prefix_bytes: int | None = None,
        records_routes: bool = False,
    ) -> None:
        """`decode` turns tokens into text, for stop strings.

        Without `is_exact` faster arithmetic is used, whose bits differ from the trainer's; None
        leaves it to what is promised for the weights' dtype. `is_open` says that requests may
        continue earlier answers, which are then kept too. The prefix cache takes at most
        `prefix_bytes`; None: a share of the machine's memory. With `records_routes` completions
        have the experts of each token, and nothing is cached: what is not read chooses none.
        """
        if not policy.is_packed:
            why = "the model was loaded with its own attention, which this engine cannot use"
            raise UserError("actor_rollout_ref.rollout.name", "native", why, "set it to hf")
        self._policy = policy
        if records_routes:
            _require_routers(policy)
        self._records_routes = records_routes
        self._limit = max_model_len
        self._rows_at_once = min(max_num_seqs, max_num_batched_tokens)
        self._tokens_at_once = max_num_batched_tokens
        self._decode = decode
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._known: dict[tuple[str, int], Row] = {}
        """Rows that wait or run, by request and sample."""
        self._parts: tuple[RowPart, ...] | None = None
        """The running rows as they are sampled; None: they have changed."""
        self._cache: RowCache | None = None
        if is_exact is None:
            is_exact = policy.device.type != "cpu" or is_promised(_dtype_name(policy))
        self._is_exact = is_exact
        self._can_split = not is_exact and can_split(policy)
        self._linears = None if is_exact else PrepackedLinears(policy, head=policy.head.linear)
        self._is_open = is_open
        caches = enable_prefix_caching and not records_routes
        self._prefixes = PrefixCache(policy, most_bytes=prefix_bytes) if caches else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._waiting and not self._rows

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a completion does not depend on the other sequences in the batch."""
        return self._is_exact

    def submit(self, request: Request) -> None:
        """Queue a request; a UserError if it can never be served."""
        refuse_impossible(request, vocabulary=self._policy.head.vocabulary)
        prompt, new = len(request.tokens), request.sampling.max_new_tokens
        if prompt > self._tokens_at_once or prompt + new > self._limit:
            raise UserError(
                f"request {request.id}",
                f"{prompt} + {new} tokens",
                f"the engine takes prompts of 1 to {self._tokens_at_once} tokens (one pass) and "
                f"sequences of at most {self._limit} (max_model_len)",
                "shorten the prompt, or raise max_num_batched_tokens or max_model_len",
            )
        rows = [Row(request, i) for i in range(len(request.keys))]
        self._known |= {(request.id, row.sample): row for row in rows}
        self._waiting += rows

    @torch.no_grad()
    def advance(self) -> list[Completion]:
        """One pass: prefill prompts while rows are free, otherwise decode one token per row."""
        if self._prefixes is not None:
            self._prefixes.begin_pass(is_idle=not self._rows)
        admitted = self._admit()
        done: list[Completion] = []
        with self._fast_linears(admitted):
            if admitted:
                done = self._prefill(admitted)
            elif self._rows:
                done = self._decode_next()
        self._free_idle()
        return done

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; its partial completions."""
        waiting = [row for row in self._waiting if row.matches(request, sample)]
        self._waiting = deque(r for r in self._waiting if not r.matches(request, sample))
        running = [i for i, row in enumerate(self._rows) if row.matches(request, sample)]
        rows = [*waiting, *self._release(running)]
        self._free_idle()
        return [self._completion(row, "aborted") for row in rows]

    def snapshot(self, request: str, sample: int, *, start: int = 0) -> TokenStream | None:
        """Tokens from number `start` on of a sample that waits or runs; None: it does neither."""
        row = self._known.get((request, sample))
        return None if row is None else row.stream(start)

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the policy's parameters, which are shared."""
        return Fingerprint.of(self._policy)

    def drop_prefixes(self) -> None:
        """Free what is cached of earlier prompts and answers; requests go on."""
        if self._prefixes is not None:
            self._prefixes.drop()

    def cache_stats(self) -> CacheStats:
        """What the prefix cache did so far."""
        return self._prefixes.stats() if self._prefixes is not None else CacheStats()

    def close(self) -> None:
        """Drop all requests and free the caches."""
        self._waiting.clear()
        self._known.clear()
        self._rows, self._parts, self._cache = [], None, None
        self.drop_prefixes()
        self._free_idle()

    def _free_idle(self) -> None:
        """When idle, free what is cheap to rebuild: training needs the memory."""
        if not self.is_idle:
            return
        # A slotted cache made for single answers would keep groups out of the two-part one.
        if self._can_split:
            self._cache = None
        if self._linears is not None:
            self._linears.drop()

    def _admit(self) -> list[AdmittedPrompt]:
        """Waiting rows that fit now, those of one prompt together."""
        free = self._rows_at_once - len(self._rows)
        budget = self._tokens_at_once
        prompts: list[AdmittedPrompt] = []
        while self._waiting and free > 0:
            row = self._waiting[0]
            if prompts and prompts[-1].rows[0].request is row.request:
                prompts[-1].rows.append(self._waiting.popleft())
                free -= 1
                continue
            found = self._prefixes.match(row.request.tokens) if self._prefixes is not None else []
            prompt = AdmittedPrompt(rows=[row], blocks=found)
            if len(prompt.tokens) - prompt.known > budget:
                break
            budget -= len(prompt.tokens) - prompt.known
            prompts.append(prompt)
            if self._prefixes is not None:
                self._prefixes.count(prompt.tokens, prompt.blocks)
            self._waiting.popleft()
            free -= 1
        return prompts

    def _prefill(self, prompts: list[AdmittedPrompt]) -> list[Completion]:
        cache = self._reserve(prompts)
        lengths = [len(prompt.tokens) for prompt in prompts]
        first = len(self._rows)
        spans: list[tuple[int, int]] = []
        for prompt in prompts:
            spans.append((first, first + len(prompt.rows)))
            first += len(prompt.rows)
        ends = torch.tensor(lengths).cumsum(0)
        starts = [int(end) - n for end, n in zip(ends, lengths, strict=True)]
        last = self._read(prompts, cache.sink(starts, lengths, spans))
        # The last hidden state of a prompt serves every sample of it.
        device = self._policy.device
        copies = torch.tensor([len(prompt.rows) for prompt in prompts], device=device)
        fresh = [row for prompt in prompts for row in prompt.rows]
        start = len(self._rows)
        self._rows += fresh
        self._parts = None
        self._keep_prompts(cache, prompts, spans)
        self._append(fresh, last.repeat_interleave(copies, 0), self._split(fresh))
        return self._finish(range(start, len(self._rows)))

    def _read(self, prompts: list[AdmittedPrompt], sink: KeyValueSink) -> Tensor:
        """The last hidden state of each prompt; the sink gets keys and values of all its tokens."""
        device = self._policy.device
        lengths = [len(prompt.tokens) for prompt in prompts]
        known = [prompt.known for prompt in prompts]
        blocks = [block for prompt in prompts for block in prompt.blocks]
        context: AttentionContext = PackedContext.of(lengths, device=device, sink=sink)
        if self._prefixes is not None and blocks:
            context = ContinuedContext.of(
                [ContinuedSequence(length=n, known=k) for n, k in zip(lengths, known, strict=True)],
                known=self._prefixes.known(blocks, device),
                sink=sink,
                device=device,
            )
        tokens = [t for prompt in prompts for t in prompt.tokens[prompt.known :]]
        positions = packed_positions(lengths, device, known)
        log = RoutingLog() if self._records_routes else None
        read = torch.tensor(tokens, device=device)
        hidden = self._policy.hidden(read, positions, context, log)
        if log is not None:
            _note_routes([(p.rows, len(p.tokens) - p.known) for p in prompts], log)
        ends = torch.tensor([n - k for n, k in zip(lengths, known, strict=True)]).cumsum(0)
        return hidden[(ends - 1).to(device)]

    def _keep_prompts(
        self,
        cache: RowCache,
        prompts: Sequence[AdmittedPrompt],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        """Cache the prompts, where a request may come that begins alike."""
        if self._prefixes is None or not (self._is_open or self._waiting):
            return
        rows = [
            CachedRow(row=row, tokens=prompt.tokens)
            for prompt, (row, _) in zip(prompts, spans, strict=True)
        ]
        self._prefixes.keep(cache, rows, is_ended=False)

    def _reserve(self, prompts: list[AdmittedPrompt]) -> RowCache:
        """The cache, with room for what runs, what is admitted now and what may follow it."""
        known = [*self._rows, *(row for prompt in prompts for row in prompt.rows), *self._waiting]
        rows = min(len(known), self._rows_at_once)
        length = max(row.limit for row in known)
        if self._cache is None:
            # Where no prompt has two answers, there is nothing to share.
            is_split = self._can_split and any(len(row.request.keys) > 1 for row in known)
            self._cache = (
                SharedPrefixCache() if is_split else SlottedCache(rows=rows, length=length)
            )
        self._cache.make_room(rows, length)
        return self._cache

    def _decode_next(self) -> list[Completion]:
        assert self._cache is not None
        device = self._policy.device
        if self._parts is None:
            self._parts = self._split(self._rows)
        lengths = [row.length for row in self._rows]
        positions = torch.tensor(lengths, device=device)
        context = self._cache.step(lengths, device)
        tokens = torch.tensor([row.tokens[-1] for row in self._rows], device=device)
        log = RoutingLog() if self._records_routes else None
        hidden = self._policy.hidden(tokens, positions, context, log)
        if log is not None:
            _note_routes([([row], 1) for row in self._rows], log)
        self._append(self._rows, hidden, self._parts)
        return self._finish(range(len(self._rows)))

    def _fast_linears(self, admitted: list[AdmittedPrompt]) -> AbstractContextManager[None]:
        """Packed weights, where they may be used and pay."""
        known = [*self._rows, *(row for prompt in admitted for row in prompt.rows), *self._waiting]
        if self._linears is None or not known:
            return nullcontext()
        return self._linears.in_use(steps=max(row.tokens_left for row in known))

    def _split(self, rows: list[Row]) -> tuple[RowPart, ...]:
        vocabulary, device = self._policy.head.vocabulary, self._policy.device
        return RowPart.split(rows, vocabulary=vocabulary, device=device)

    def _append(self, rows: list[Row], hidden: Tensor, parts: tuple[RowPart, ...]) -> None:
        """Sample one token for each row and append it."""
        logits = self._policy.head.logits(hidden, temperature=1.0)
        generated = torch.tensor([len(row.tokens) for row in rows], device=hidden.device)
        for part in parts:
            of_part = [rows[i] for i in part.indices]
            append_tokens(of_part, self._sample(of_part, part, logits, generated))

    def _sample(
        self, rows: list[Row], part: RowPart, logits: Tensor, generated: Tensor
    ) -> NextTokens:
        """The next token of each row of a part."""
        tensors, generated = part.tensors, part.take(generated)
        logits = part.take(logits)
        if tensors.temperature is not None:
            logits = logits / tensors.temperature
        uniform = uniforms(tensors.keys, generated)
        is_plain = rows[0].is_plain
        if is_plain and not self._is_exact and tensors.limits is None:
            return sample_untruncated(logits, uniform, tensors.greedy)
        allowed = allowed_tokens(rows, vocabulary=logits.shape[-1])
        return sample_tokens(
            logits,
            uniform,
            tensors.greedy,
            tensors.limits_at(generated),
            allowed=None if allowed is None else allowed.to(logits.device),
            top=tensors.top,
            log_softmax=self._policy.head.log_probabilities,
        )

    def _finish(self, indices: range) -> list[Completion]:
        """Completions of the rows that ended, which are removed."""
        ended: dict[int, Ending] = {}
        for index in indices:
            reason = self._rows[index].ending(self._decode)
            if reason is not None:
                ended[index] = reason
        self._keep_answers(list(ended))
        rows = self._release(list(ended))
        return [self._completion(row, why) for row, why in zip(rows, ended.values(), strict=True)]

    def _completion(self, row: Row, reason: Ending) -> Completion:
        """The completion of a row, which is forgotten."""
        self._known.pop((row.request.id, row.sample), None)
        return row.completion(reason)

    def _release(self, indices: list[int]) -> list[Row]:
        """Take rows out; the last row moves into each gap, so that rows stay dense."""
        found = [self._rows[index] for index in indices]
        for index in sorted(indices, reverse=True):
            last = len(self._rows) - 1
            if self._cache is not None:
                self._cache.remove(index, last, self._rows[last].length)
            self._rows[index] = self._rows[last]
            self._rows.pop()
        if indices:
            self._parts = None
        return found

    def _keep_answers(self, indices: Sequence[int]) -> None:
        """Cache rows that end, where requests may continue them; their newest token has no keys."""
        if self._prefixes is None or self._cache is None or not self._is_open:
            return
        rows = [
            CachedRow(row=i, tokens=(*self._rows[i].request.tokens, *self._rows[i].tokens[:-1]))
            for i in indices
        ]
        self._prefixes.keep(self._cache, rows, is_ended=True)


def _require_routers(policy: Policy) -> None:
    """A UserError for a model whose routers are not read."""
    if not policy.is_routed:
        why = "this model has no routed layers that are known"
        raise UserError(_ROUTES_FIELD, type(policy.model).__name__, why, "set it to false")


def _note_routes(read: Sequence[tuple[Sequence[Row], int]], log: RoutingLog) -> None:
    """Give rows, of which each group read so many tokens together, the experts of these tokens."""
    shape, place = log.routes(), 0
    for rows, count in read:
        found = shape.data[place * shape.token_bytes : (place + count) * shape.token_bytes]
        place += count
        for row in rows:
            row.routes = row.routes or RouteRecord(shape)
            row.routes.add(found)


def _dtype_name(policy: Policy) -> str:
    """The weights' dtype as a config spells it."""
    return str(policy.head.linear.weight.dtype).removeprefix("torch.")
