"""One decode step on the device, from last tokens to next ones, without waiting for the host."""

from dataclasses import replace

import torch
from torch import Tensor

from luyen.models.head import Head
from luyen.models.policy import Policy
from luyen.rollout.native.paged.context import DrawContext
from luyen.rollout.native.paged.pool import KeyValues
from luyen.rollout.native.paged.state import RowState
from luyen.rollout.native.sample import Drawn, draw, uniforms


@torch.no_grad()
def draw_step(
    policy: Policy,
    cache: KeyValues,
    state: RowState,
    rows: int,
    *,
    is_truncated: bool,
    is_split: bool,
    members: int = 0,
) -> None:
    """One token for each of the first `rows` rows that is active.

    Groups of up to `members` rows read their common pages together; 0: nobody does.
    """
    here = slice(0, rows)
    place, slots, lengths = state.begin(here)
    context = DrawContext(
        cache=cache,
        slots=slots,
        tables=state.tables[here],
        lengths=lengths,
        is_split=is_split,
        arrivals=state.arrivals,
        groups=state.groups.of(rows, members) if members else None,
    )
    hidden = policy.hidden(state.tokens[here], place, context)
    draws = draw_rows(policy.head, hidden, state, here, is_truncated=is_truncated)
    state.accept(here, draws, is_cached=True)


def draw_rows(
    head: Head, hidden: Tensor, state: RowState, here: slice, *, is_truncated: bool
) -> Drawn:
    """The next token of each row in `here`, given its last hidden state."""
    keys, count, greedy = state.keys[here], state.drawn[here], state.greedy[here]
    temperature = state.temperature[here]
    limits = state.truncation(here) if is_truncated else None
    if not hidden.is_cuda:
        logits = head.logits(hidden, temperature=1.0) / temperature[:, None]
        return draw(logits, uniforms(keys, count), greedy, limits)
    raw = head.linear(hidden)
    plain = _sampled(head, raw, keys, count, temperature, greedy)
    if limits is None:
        return plain
    logits = head.from_linear(raw) / temperature[:, None]
    cut = draw(logits, uniforms(keys, count), greedy, limits)
    # Rows that truncate nothing draw as they would in other company.
    tokens = torch.where(state.is_truncated(here), cut.tokens, plain.tokens)
    return replace(cut, tokens=tokens, logps=_scored(head, raw, tokens, temperature))


def _sampled(
    head: Head, raw: Tensor, keys: Tensor, count: Tensor, temperature: Tensor, greedy: Tensor
) -> Drawn:
    """Two kernels over the logits."""
    from luyen.models.cuda.vocabulary_draw import sample_rows

    tokens, logps = torch.empty_like(count), torch.empty_like(temperature)
    sample_rows(
        raw,
        keys,
        count,
        temperature,
        greedy,
        vocabulary=head.vocabulary,
        scale=head.scale,
        softcap=head.softcap,
        out_tokens=tokens,
        out_logps=logps,
    )
    return Drawn(tokens=tokens, logps=logps, kept=None)


def _scored(head: Head, raw: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities by the trainer's kernel: another formula would differ in the last bit."""
    from luyen.models.cuda.vocabulary import score_rows

    return score_rows(
        raw,
        tokens,
        vocabulary=head.vocabulary,
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        entropy=False,
        sum_pi_squared=False,
    )[0]
