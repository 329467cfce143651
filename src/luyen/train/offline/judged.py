"""Rows as sequences with the tokens on which a reward model judges them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from luyen.base.errors import UserError
from luyen.data.formats.records import ConversationRow, LabelledRow, PreferenceRow, SteppedRow
from luyen.data.formats.render import render_answer, render_conversation, render_steps
from luyen.data.render import Renderer
from luyen.engine.batch import PackedBatch, pack
from luyen.engine.lesson import Lesson
from luyen.engine.reward_model import JUDGED, LABELS, MARGINS, TARGETS
from luyen.train.offline.pairs import lay_pairs, margin_of

Rated: TypeAlias = LabelledRow | ConversationRow
BLOCK = "reward_training"


def lay_judged_pairs(
    rows: Sequence[PreferenceRow],
    places: Sequence[int],
    renderer: Renderer,
    device: torch.device,
    *,
    use_margins: bool = False,
) -> Lesson:
    """Two sequences for each row, the chosen one first, each judged on its last token."""
    laid = lay_pairs(rows, places, renderer, device)
    margins = [margin_of(rows[place], block=BLOCK) for place in places] if use_margins else []
    numbers = {MARGINS: torch.tensor(margins, device=device)} if use_margins else {}
    return replace(laid, batch=_judged_at_the_end(laid.batch), numbers=numbers)


def lay_rated(
    rows: Sequence[Rated],
    places: Sequence[int],
    renderer: Renderer,
    device: torch.device,
    *,
    target_key: str,
) -> Lesson:
    """One sequence for each row, judged on its last token, with the number that the row gives."""
    chosen = [rows[place] for place in places]
    laid = [_rated_tokens(row, renderer) for row in chosen]
    batch = pack(
        [tokens for tokens, _ in laid],
        masks=[mask for _, mask in laid],
        groups=list(range(len(laid))),
        device=device,
    )
    targets = torch.tensor([target_of(row, target_key) for row in chosen], device=device)
    return Lesson(rows=tuple(places), batch=_judged_at_the_end(batch), numbers={TARGETS: targets})


def lay_steps(
    rows: Sequence[SteppedRow], places: Sequence[int], renderer: Renderer, device: torch.device
) -> Lesson:
    """One sequence for each row, judged on the last token of every step that has a label."""
    laid = [render_steps(rows[place], renderer) for place in places]
    batch = pack(
        [one.prompt + one.tokens for one in laid],
        masks=[[False] * len(one.prompt) + [True] * len(one.tokens) for one in laid],
        groups=list(range(len(laid))),
        device=device,
    )
    judged, labels = torch.zeros(len(batch.tokens)), list[float]()
    offset = 0
    for one in laid:
        for end, label in zip(one.ends, one.labels, strict=True):
            if label is not None:
                judged[offset + len(one.prompt) + end] = 1.0
                labels.append(label)
        offset += len(one.prompt) + len(one.tokens)
    if not labels:
        why = f"no step of these {len(laid)} rows has a label"
        raise UserError("data.train_files", len(laid), why, "drop rows that nobody judged")
    numbers = {LABELS: torch.tensor(labels, device=device)}
    streamed = batch.with_streams(**{JUDGED: judged.to(device)})
    return Lesson(rows=tuple(places), batch=streamed, numbers=numbers)


def _judged_at_the_end(batch: PackedBatch) -> PackedBatch:
    judged = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    judged[batch.layout.offsets[1:] - 1] = 1.0
    return batch.with_streams(**{JUDGED: judged})


def _rated_tokens(row: Rated, renderer: Renderer) -> tuple[tuple[int, ...], list[bool]]:
    """The whole conversation as the template writes it in the end, and where answers are."""
    if isinstance(row, LabelledRow):
        answer = render_answer(row, renderer)
        return answer.tokens, [False] * len(answer.prompt) + list(answer.answer.mask)
    last = render_conversation(row, renderer)[-1]
    return last.rendered.tokens, [weight > 0 for weight in last.weights]


def target_of(row: Rated, target_key: str) -> float:
    """The number that a row gives its answer; a UserError where it gives none."""
    found = row.extra_info.get(target_key)
    if isinstance(found, int | float) and math.isfinite(found):
        return float(found)
    if found is None and isinstance(row, LabelledRow):
        return float(row.label)
    why = f"a row gives {found!r} there, and a score to learn is a finite number"
    raise UserError(f"{BLOCK}.target_key", target_key, why, "name a column of numbers")
