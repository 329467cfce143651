"""Log-probabilities of given tokens, as clients want them that score texts instead of sampling.

The arithmetic is the trainer's: packed sequences through the policy's own forward, and its head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.head import Head, LogitTransform, log_probabilities, score, score_logits
from luyen.models.policy import Policy
from luyen.rollout.native.sampler import TopTokens, likeliest
from luyen.rollout.protocol import MOST_TOP_LOGPROBS, TopLogps

_TOKENS_AT_ONCE = 4096
"""Tokens that are packed into one pass; a longer prompt has a pass of its own."""
_LOGITS_AT_ONCE = 1 << 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Scores of the tokens of one prompt, at temperature 1.

    Example:
        >>> PromptScores(logps=(None, -0.5)).top_logps
        ()
    """

    logps: tuple[float | None, ...]
    """Log-probability of each token given those before it; None for the first."""
    top_logps: tuple[TopLogps | None, ...] = ()
    """The likeliest tokens at each place, None at the first; empty where none were wanted."""


@torch.no_grad()
def prompt_logps(
    policy: Policy, tokens: Sequence[Sequence[int]], *, top: int = 0
) -> list[PromptScores]:
    """Scores of several prompts, with the `top` likeliest tokens at each place.

    The log-probabilities are those of the trainer to the bit, where exactness is promised; how
    prompts are batched changes nothing then.
    """
    _refuse_unscorable(tokens, top, policy.head.vocabulary)
    found: list[PromptScores] = []
    for part in _passes([len(prompt) for prompt in tokens]):
        found += _score_pass(policy, tokens[part], top)
    return found


def _refuse_unscorable(tokens: Sequence[Sequence[int]], top: int, vocabulary: int) -> None:
    if not 0 <= top <= MOST_TOP_LOGPROBS:
        why = f"at most {MOST_TOP_LOGPROBS} likeliest tokens can be reported"
        raise UserError("top", top, why, "ask for fewer")
    for place, prompt in enumerate(tokens):
        if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
            why = f"a prompt has at least one token, and ids go from 0 to {vocabulary - 1}"
            raise UserError(f"tokens[{place}]", len(prompt), why, "correct the prompt")


def _passes(lengths: Sequence[int]) -> list[slice]:
    """Prompts that are packed together.

    Example:
        >>> _passes([3000, 1000, 200, 9000])
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    found: list[slice] = []
    first = total = 0
    for index, length in enumerate(lengths):
        if index > first and total + length > _TOKENS_AT_ONCE:
            found.append(slice(first, index))
            first, total = index, 0
        total += length
    return [*found, slice(first, len(lengths))] if lengths else []


def _score_pass(policy: Policy, prompts: Sequence[Sequence[int]], top: int) -> list[PromptScores]:
    lengths = [len(prompt) for prompt in prompts]
    ends = list(accumulate(n - 1 for n in lengths))
    logps: list[float] = []
    tops: list[TopLogps] = []
    if ends[-1] > 0:
        tokens = torch.tensor(list(chain.from_iterable(prompts)), device=policy.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[torch.tensor([0, *accumulate(lengths)][:-1], device=policy.device)] = False
        where = mask.nonzero()[:, 0]
        hidden = policy.packed_hidden(tokens, lengths, mask, where - 1, is_shared=False)
        logps = score(policy.head, hidden, tokens.index_select(0, where)).logp.tolist()
        tops = _likeliest(policy.head, hidden, top) if top else []
    starts = [end - n + 1 for end, n in zip(ends, lengths, strict=True)]
    return [
        PromptScores(
            logps=(None, *logps[start:end]),
            top_logps=(None, *tops[start:end]) if top else (),
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def _likeliest(head: Head, hidden: Tensor, top: int) -> list[TopLogps]:
    """The likeliest tokens after each hidden state, logits of a part alive at a time."""
    found: list[TopLogps] = []
    for part in hidden.split(max(1, _LOGITS_AT_ONCE // head.vocabulary)):
        raw = head.linear(part)
        if raw.is_cuda:
            best = _rescored(head, raw, likeliest(head.from_linear(raw), top))
        else:
            best = likeliest(log_probabilities(head.from_linear(raw)), top)
        pairs = zip(best.ids.tolist(), best.logps.tolist(), strict=True)
        found += [tuple(zip(ids, logps, strict=True)) for ids, logps in pairs]
    return found


def _rescored(head: Head, raw: Tensor, best: TopTokens) -> TopTokens:
    """The same tokens with the log-probabilities of the head's kernels, as the engine reports them.

    Another formula would differ in the last bit.
    """
    form = LogitTransform(
        vocabulary=head.vocabulary, scale=head.scale, softcap=head.softcap, temperature=1.0
    )
    wanted = (False, False, False)
    columns = [score_logits(raw, ids, form, wanted)[0] for ids in best.ids.unbind(1)]
    return best.with_logps(torch.stack(columns, 1))
