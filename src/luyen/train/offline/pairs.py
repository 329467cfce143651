"""Preference pairs and labelled answers as packed tokens."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from luyen.base.errors import UserError
from luyen.data.formats.records import LabelledRow, PreferenceRow
from luyen.data.formats.render import RenderedAnswer, render_answer, render_pair
from luyen.data.render import Renderer
from luyen.engine.batch import OfflineBatch, PackedBatch, pack
from luyen.engine.preference import DESIRABLE, MARGINS, MISMATCHED

Labelled: TypeAlias = LabelledRow | PreferenceRow


def pack_pairs(
    rows: Sequence[PreferenceRow],
    places: Sequence[int],
    renderer: Renderer,
    device: torch.device,
    *,
    use_margins: bool = False,
    is_validation: bool = False,
) -> OfflineBatch:
    """Two sequences per row, the chosen one first; they share a group and so their prompt.

    `is_validation` marks the rows of the batch as validation rows.
    """
    tokens, masks, groups = list[tuple[int, ...]](), list[list[bool]](), list[int]()
    margins: list[float] = []
    for number, place in enumerate(places):
        pair = render_pair(rows[place], renderer, allow_whole=True)
        for answer in (pair.chosen, pair.rejected):
            tokens.append(pair.prompt + answer.tokens)
            masks.append([False] * len(pair.prompt) + list(answer.mask))
            groups.append(number)
        if use_margins:
            margins.append(margin_of(rows[place]))
    numbers = {MARGINS: torch.tensor(margins, device=device)} if use_margins else {}
    batch = pack(tokens, masks=masks, groups=groups, device=device)
    return OfflineBatch(rows=_row_numbers(places, is_validation), batch=batch, numbers=numbers)


def pack_labelled(
    rows: Sequence[Labelled],
    places: Sequence[int],
    renderer: Renderer,
    device: torch.device,
    *,
    is_mismatched: bool = False,
    longest: int | None = None,
    is_validation: bool = False,
) -> OfflineBatch:
    """One sequence per labelled answer; a pair counts as a desirable and an undesirable one.

    With `is_mismatched` each prompt is also paired with an answer of another row (KTO's KL
    estimate), in at most `longest` tokens; the choice depends on the rows only.
    """
    answers = [_answers(rows[place]) for place in places]
    marked = [one for some in answers for one in some]
    aside: dict[str, PackedBatch] = {}
    if is_mismatched:
        mismatched = [one for p in places for one in _mismatched(rows, p, renderer, longest)]
        aside[MISMATCHED] = _packed(mismatched, device)
    return OfflineBatch(
        rows=_row_numbers(places, is_validation),
        sequences=tuple(map(len, answers)),
        batch=_packed([render_answer(row, renderer) for row in marked], device),
        aside=aside,
        numbers={DESIRABLE: torch.tensor([row.label for row in marked], device=device)},
    )


def _answers(row: Labelled) -> tuple[LabelledRow, ...]:
    if isinstance(row, LabelledRow):
        return (row,)
    return tuple(
        LabelledRow(
            prompt=row.prompt,
            completion=said,
            label=is_good,
            tools=row.tools,
            template_kwargs=row.template_kwargs,
        )
        for said, is_good in ((row.chosen, True), (row.rejected, False))
    )


def _mismatched(
    rows: Sequence[Labelled], place: int, renderer: Renderer, longest: int | None
) -> list[RenderedAnswer]:
    """This row's prompt with the answers of the next row that has another prompt and fits."""
    row, count = rows[place], len(rows)
    for step in range(1, count):
        other = rows[(place + step) % count]
        if other.prompt == row.prompt:
            continue
        found = [render_answer(one, renderer) for one in _exchanged(row, other)]
        if longest is None or max(len(one.tokens) for one in found) <= longest:
            return found
    why = "no other row asks something else and fits, and kto needs answers to other prompts"
    fix = "add rows, or choose preference.loss_type=apo_zero_unpaired"
    raise UserError("data.train_files", count, why, fix)


def _exchanged(row: Labelled, other: Labelled) -> list[LabelledRow]:
    """The prompt of this row with the answers of another."""
    said = [one.completion for one in _answers(other)]
    return [
        LabelledRow(
            prompt=one.prompt,
            completion=said[i % len(said)],
            label=one.label,
            tools=one.tools,
            template_kwargs=one.template_kwargs,
        )
        for i, one in enumerate(_answers(row))
    ]


def _packed(answers: Sequence[RenderedAnswer], device: torch.device) -> PackedBatch:
    return pack(
        [one.tokens for one in answers],
        masks=[[False] * len(one.prompt) + list(one.answer.mask) for one in answers],
        groups=list(range(len(answers))),
        device=device,
    )


def margin_of(row: PreferenceRow, *, block: str = "preference") -> float:
    """The margin of a row; a UserError that names `block` where it has none."""
    if row.margin is None:
        why = "a row has no margin"
        raise UserError(f"{block}.use_margins", True, why, "add the column, or set it to false")
    return row.margin


def _row_numbers(places: Sequence[int], is_validation: bool) -> tuple[int, ...]:
    """Row indices, as -1 - index for validation rows."""
    return tuple(-1 - place for place in places) if is_validation else tuple(places)
