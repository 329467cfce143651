"""Sequences being generated: one row each, and their sampling settings as dense tensors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.records import ExpertRoutes
from luyen.data.template_text import common_start
from luyen.rollout.native.sampler import NextTokens, TopTokens, TruncationLimits
from luyen.rollout.protocol import Completion, Ending, Request, TokenStream, TopLogps

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Turns tokens into text."""

_MARGIN = 16
"""Tokens decoded beyond the length of a stop string, in case some are worth no character."""


def signed_key(key: int) -> int:
    """An unsigned 64-bit key as torch's int64 holds it."""
    return key - (1 << 64) if key >= 1 << 63 else key


@final
class RouteRecord:
    """Experts of the tokens of one row, in the order in which they were read."""

    __slots__ = ("_read", "_shape")

    def __init__(self, shape: ExpertRoutes) -> None:
        """`shape` has the sizes."""
        self._shape = shape
        self._read = bytearray()

    def known(self) -> ExpertRoutes:
        """What was read so far."""
        return replace(self._shape, data=bytes(self._read))

    def add(self, read: bytes) -> None:
        """Append the experts of the tokens that were read."""
        self._read += read


@final
class Row:
    """One sequence being generated."""

    __slots__ = (
        "allowed",
        "constraint",
        "kept",
        "logps",
        "request",
        "routes",
        "sample",
        "tokens",
        "top_logps",
    )

    def __init__(self, request: Request, sample: int) -> None:
        """`sample` is the index of its key in the request."""
        self.request = request
        self.sample = sample
        self.tokens: list[int] = []
        self.logps: list[float] = []
        self.kept: list[float] = []
        self.top_logps: list[TopLogps] = []
        self.routes: RouteRecord | None = None
        """Experts of the tokens that were read; None: they are not recorded."""
        self.constraint = None if request.constraint is None else request.constraint.start()
        """State of the request's constraint after the tokens so far."""
        self.allowed = None if self.constraint is None else self.constraint.allowed()
        """Tokens that the constraint allows next; None: it has ended, or there is none."""

    def matches(self, request: str, sample: int | None) -> bool:
        """Whether it is the sample of the request, or any of them."""
        return self.request.id == request and sample in (None, self.sample)

    @property
    def length(self) -> int:
        """Tokens whose keys are cached: the prompt and all but the newest token."""
        return len(self.request.tokens) + max(0, len(self.tokens) - 1)

    @property
    def limit(self) -> int:
        """Tokens it may come to have."""
        return len(self.request.tokens) + self.request.sampling.max_new_tokens

    @property
    def tokens_left(self) -> int:
        """Tokens it may still generate."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    @property
    def is_plain(self) -> bool:
        """Whether it has neither a constraint nor likeliest tokens to report."""
        return self.constraint is None and self.request.sampling.top_logprobs == 0

    def append(self, token: int, logp: float, kept: float, top: TopLogps = ()) -> None:
        """Append a token; a UserError if the weights gave no probability."""
        if not math.isfinite(logp):
            raise UserError(
                "actor_rollout_ref.model.path",
                self.request.id,
                f"the weights give the log-probability {logp} at token {len(self.tokens)}",
                "start from weights that are finite; if training made them so, lower the rate",
            )
        self.tokens.append(token)
        self.logps.append(logp)
        self.kept.append(kept)
        if self.request.sampling.top_logprobs > 0:
            self.top_logps.append(top)
        if self.constraint is not None and self.allowed is not None:
            self.constraint.accept(token)
            allowed = None if self.constraint.is_finished else self.constraint.allowed()
            self.allowed = allowed if allowed is not None and bool(allowed.any()) else None

    def extend(
        self,
        tokens: list[int],
        logps: list[float],
        kept: list[float] | None,
        decode: Decode | None,
        tops: list[TopLogps] | None = None,
    ) -> Ending | None:
        """Append tokens up to the one that ends the row; why it ended, if it did."""
        sampling = self.request.sampling
        masses = kept if kept is not None else [1.0] * len(tokens)
        has_text_stops = bool(sampling.stop_strings) and not sampling.ignore_stop
        if has_text_stops or not self.is_plain or not all(map(math.isfinite, logps)):
            places = tops if tops is not None else [()] * len(tokens)
            for token, logp, mass, top in zip(tokens, logps, masses, places, strict=True):
                self.append(token, logp, mass, top)
                reason = self.ending(decode)
                if reason is not None:
                    return reason
            return None
        count = min(len(tokens), sampling.max_new_tokens - len(self.tokens))
        if not sampling.ignore_stop and sampling.stop_ids:
            stops = (i + 1 for i, t in enumerate(tokens[:count]) if t in sampling.stop_ids)
            count = next(stops, count)
        self.tokens += tokens[:count]
        self.logps += logps[:count]
        self.kept += masses[:count]
        return self.ending(decode)

    def ending(self, decode: Decode | None) -> Ending | None:
        """Why the newest token ends the row; None: it continues."""
        sampling = self.request.sampling
        if not sampling.ignore_stop and (
            self.tokens[-1] in sampling.stop_ids or self._has_stop_string(decode)
        ):
            return "stop"
        if self.constraint is not None and self.constraint.is_finished:
            return "stop"
        if len(self.tokens) >= sampling.max_new_tokens:
            return "length"
        # No token continues what there is: the vocabulary cannot spell the rest.
        return "aborted" if self.constraint is not None and self.allowed is None else None

    def stream(self, start: int) -> TokenStream:
        """The tokens from number `start` on."""
        return TokenStream(
            tokens=tuple(self.tokens[start:]),
            logps=tuple(self.logps[start:]),
            top_logps=tuple(self.top_logps[start:]),
        )

    def completion(self, reason: Ending) -> Completion:
        """The completion of the tokens so far."""
        return Completion(
            request=self.request.id,
            sample=self.sample,
            tokens=tuple(self.tokens),
            logps=tuple(self.logps),
            reason=reason,
            kept_mass=tuple(self.kept) if self.request.is_truncated else (),
            top_logps=tuple(self.top_logps),
            routes=None if self.routes is None else self.routes.known(),
        )

    def _has_stop_string(self, decode: Decode | None) -> bool:
        """Whether the newest token completes a stop string; only the end is decoded."""
        sampling = self.request.sampling
        strings = sampling.stop_strings
        if not strings or decode is None or len(self.tokens) <= sampling.min_new_tokens:
            return False
        longest = max(len(stop.encode()) for stop in strings)
        tail = self.tokens[-longest - _MARGIN :]
        text = decode(tail)
        if sampling.min_new_tokens == 0:
            return any(stop in text for stop in strings)
        # What was complete too early to end the answer does not end it later.
        known = len(common_start(text, decode(tail[:-1])))
        return any(text.rfind(stop) + len(stop) > known for stop in strings if stop in text)


def append_tokens(rows: Sequence[Row], sampled: NextTokens) -> None:
    """Append one token to each row."""
    tokens, logps = sampled.tokens.tolist(), sampled.logps.tolist()
    kept = sampled.kept.tolist() if sampled.kept is not None else [1.0] * len(rows)
    tops = top_pairs(rows, sampled.top)
    for row, token, logp, mass, top in zip(rows, tokens, logps, kept, tops, strict=True):
        row.append(token, logp, mass, top)


def top_pairs(rows: Sequence[Row], top: TopTokens | None) -> list[TopLogps]:
    """The likeliest tokens of each row, as many as it reports."""
    if top is None:
        return [()] * len(rows)
    counts = [row.request.sampling.top_logprobs for row in rows]
    columns = zip(counts, top.ids.tolist(), top.logps.tolist(), strict=True)
    return [tuple(zip(ids[:n], logps[:n], strict=True)) for n, ids, logps in columns]


def allowed_tokens(rows: Sequence[Row], *, vocabulary: int) -> Tensor | None:
    """`[rows, vocabulary]` tokens that constraints allow; None where no row is constrained."""
    if all(row.allowed is None for row in rows):
        return None
    everything = torch.ones(vocabulary, dtype=torch.bool)
    return torch.stack([everything if row.allowed is None else row.allowed for row in rows])


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTensors:
    """Sampling parameters of each row as tensors; rebuilt when the set of rows changes.

    Example:
        >>> RowTensors.of([], vocabulary=4, device="cpu").greedy is None
        True
    """

    keys: Tensor
    """Random key of each row."""
    temperature: Tensor | None
    """`[rows, 1]`; None when all are 1."""
    greedy: Tensor | None
    """Rows that take the likeliest token; None when none does."""
    limits: TruncationLimits | None
    """Truncation, with the tokens barred at first; None when no row truncates."""
    floors: Tensor | None
    """`[rows, 1]` tokens before which ids are barred; None when no row bars any."""
    top: int
    """Most likeliest tokens that a row reports; 0: none does."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], *, vocabulary: int, device: torch.device | str
    ) -> "RowTensors":
        """Gather the settings of these rows."""
        params = [row.request.sampling for row in rows]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        limits = None
        most = max((len(p.barred_ids) for p in params), default=0)
        if any(p.is_truncated for p in params):
            # A greedy row in the same batch keeps everything: its own limits mean nothing.
            sizes = [p.top_k if p.top_k > 0 and p.is_filtered else vocabulary for p in params]
            barred = [padded(sorted(p.barred_ids), most, -1) for p in params]
            limits = TruncationLimits(
                top_k=torch.tensor(sizes, device=device)[:, None],
                top_p=column([p.top_p if p.is_filtered else 1.0 for p in params]),
                min_p=column([p.min_p if p.is_filtered else 0.0 for p in params]),
                barred=torch.tensor(barred, device=device) if most else None,
            )
        floors = torch.tensor([p.min_new_tokens for p in params], device=device)[:, None]
        greedy = [p.is_greedy for p in params]
        scales = [1.0 if p.is_greedy else p.temperature for p in params]
        keys = [signed_key(row.request.keys[row.sample]) for row in rows]
        return cls(
            keys=torch.tensor(keys, dtype=torch.int64, device=device),
            temperature=column(scales) if any(s != 1.0 for s in scales) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            limits=limits,
            floors=floors if most else None,
            top=max((p.top_logprobs for p in params), default=0),
        )

    def limits_at(self, generated: Tensor) -> TruncationLimits | None:
        """Limits of the next token, for rows that have generated this many."""
        if self.limits is None or self.limits.barred is None or self.floors is None:
            return self.limits
        barred = torch.where(generated[:, None] < self.floors, self.limits.barred, -1)
        return replace(self.limits, barred=barred)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPart:
    """Rows that are sampled together.

    Example:
        >>> RowPart.split([], vocabulary=4, device="cpu")
        ()
    """

    indices: tuple[int, ...]
    """Places of the rows."""
    index: Tensor | None
    """The same as a tensor; None: they are all rows."""
    tensors: RowTensors
    """Their sampling parameters."""

    @classmethod
    def split(
        cls, rows: Sequence[Row], *, vocabulary: int, device: torch.device | str
    ) -> "tuple[RowPart, ...]":
        """Plain rows apart from the rest: they are sampled as they would be alone."""
        parts: list[RowPart] = []
        for is_plain in (True, False):
            indices = tuple(i for i, row in enumerate(rows) if row.is_plain is is_plain)
            if indices:
                part = [rows[i] for i in indices]
                index = torch.tensor(indices, device=device) if len(part) < len(rows) else None
                tensors = RowTensors.of(part, vocabulary=vocabulary, device=device)
                parts.append(cls(indices=indices, index=index, tensors=tensors))
        return tuple(parts)

    def take(self, whole: Tensor) -> Tensor:
        """What belongs to these rows."""
        return whole if self.index is None else whole.index_select(0, self.index)


def padded(values: list[int], size: int, filler: int) -> list[int]:
    """The values, filled up to `size`."""
    return values + [filler] * (size - len(values))
