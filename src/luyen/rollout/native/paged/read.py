"""Reading prompts: packed into passes within a token budget, long ones in several chunks."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from luyen.models.paged import PAGE, Chunks, sent
from luyen.models.policy import Policy
from luyen.rollout.native.paged.context import ReadContext
from luyen.rollout.native.paged.pool import KeyValues


def read_prompts(
    policy: Policy,
    cache: KeyValues,
    prompts: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    *,
    tokens_at_once: int,
) -> Tensor:
    """Fill the pages of each prompt, and give the last hidden state of each, `[prompts, hidden]`.

    A result does not depend on the budget: chunks look at their predecessors through the pages.
    """
    device = policy.device
    # One transfer for all tokens and tables; passes take slices of them on the device.
    flat = array("q")
    for prompt in prompts:
        flat.extend(prompt)
    tokens = sent(flat, device, torch.int64)
    widest = max(len(some) for some in pages)
    rows = [[*some, *[0] * (widest - len(some))] for some in pages]
    tables = sent(rows, device, torch.int32)
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    last: list[Tensor] = [torch.empty(0)] * len(prompts)
    for part in _passes([len(prompt) for prompt in prompts], tokens_at_once):
        hidden = _read_pass(policy, cache, tokens, tables, starts, part)
        end = 0
        for index, _, count in part:
            end += count
            last[index] = hidden[end - 1]
    return torch.stack(last)


def _passes(lengths: Sequence[int], budget: int) -> list[list[tuple[int, int, int]]]:
    """(prompt, first token, tokens) of each chunk, pass by pass.

    Example:
        >>> _passes([5, 3], 4)
        [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)]]
    """
    passes: list[list[tuple[int, int, int]]] = [[]]
    room = budget
    for index, length in enumerate(lengths):
        done = 0
        while done < length:
            if room == 0:
                passes.append([])
                room = budget
            count = min(length - done, room)
            passes[-1].append((index, done, count))
            done += count
            room -= count
    return passes


def _read_pass(
    policy: Policy,
    cache: KeyValues,
    tokens: Tensor,
    tables: Tensor,
    starts: Sequence[int],
    part: list[tuple[int, int, int]],
) -> Tensor:
    device = tokens.device
    columns = sent(part, device)
    prompt, done, count = columns.unbind(1)
    total = sum(count for *_, count in part)
    owner = torch.repeat_interleave(
        torch.arange(len(part), device=device), count, output_size=total
    )
    first = torch.cumsum(count, 0) - count
    place = torch.arange(total, device=device) - first[owner] + done[owner]
    begins = sent([starts[index] for index, *_ in part], device)
    table = tables[prompt]
    page = table[owner, place // PAGE].long()
    context = ReadContext(
        cache=cache,
        slots=page * PAGE + place % PAGE,
        tables=table,
        chunks=Chunks.of(
            [count for *_, count in part], [done + count for _, done, count in part], device=device
        ),
    )
    return policy.hidden(tokens[begins[owner] + place], place, context)
