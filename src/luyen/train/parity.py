"""The gap between sampler and trainer in a step: its parts, and the tokens where it is largest."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.parity import GapInputs, GapParts, largest_part, part_metrics, split_gap
from luyen.base.files import write_whole, writing
from luyen.base.records import Branch, Rollout
from luyen.base.seals import sealed_page
from luyen.engine.batch import PackedBatch
from luyen.train.run import OnlineRun

SCHEMA = 1
"""Version of the files."""
WORST = 10
"""Tokens that a step writes down."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A token about whose probability sampler and trainer disagree.

    Example:
        >>> WorstToken(rollout="3.0.a/1", branch=0, position=7, token=5, text="4", version=2,
        ...            trainer=-0.5, sampler=-0.25, kept_mass=None, part="engine").gap
        -0.25
    """

    rollout: str
    """Group and sample."""
    branch: int
    """Index of the token list it stands in; 0 unless a template rewrote the conversation."""
    position: int
    """Index in that list, the prompt included."""
    token: int
    """Its id."""
    text: str
    """The token as text."""
    version: int | None
    """Version of the weights that drew it; None: nothing did, and the mask is wrong."""
    trainer: float
    """The trainer's log-probability."""
    sampler: float
    """The sampler's."""
    kept_mass: float | None
    """Probability that top-k, top-p and min-p left there; None: they are off."""
    part: str
    """What has the largest share in it."""

    @property
    def gap(self) -> float:
        """The difference of the two."""
        return self.trainer - self.sampler

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "gap": self.gap}


def note_parity(run: OnlineRun, rollouts: Sequence[Rollout], batch: PackedBatch) -> None:
    """Add the parts of the gap to the step's numbers; where there is one, write its worst tokens.

    `rollouts` are those of the batch, in its order. In bypass mode and while a critic warms up
    nothing was measured, and nothing is said.
    """
    logp = batch.streams["old_logp"] if run.needs.old_logp == "compute" else run.trainer_logp
    if logp is None:
        return
    inputs = gap_inputs(rollouts, batch, logp, version=run.version)
    parts = split_gap(inputs)
    run.notes |= part_metrics(parts)
    tokenizer = run.roles.generation.renderer.tokenizer
    worst = worst_tokens(
        rollouts,
        batch.layout.mask.nonzero()[:, 0],
        inputs,
        parts,
        text_of=lambda token: tokenizer.decode([token], skip_special=False),
    )
    if worst:
        page = {"schema": SCHEMA, "step": run.step + 1, "tokens": [t.as_json() for t in worst]}
        path = run.recorder.directory.parity(run.step + 1)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, sealed_page(page))


def gap_inputs(
    rollouts: Sequence[Rollout], batch: PackedBatch, logp: Tensor, *, version: int
) -> GapInputs:
    """What is known about the sampled tokens; `version` is that of the present weights."""
    # A rollout has the streams of its last branch; `branches` would copy them.
    mask, rows = batch.layout.mask, [(r, part) for r in rollouts for part in (*r.earlier, r)]
    sampled = batch.streams.get("sampled_logp")
    is_old = any(v not in (None, version) for _, branch in rows for v in set(branch.versions))
    has_drift = any(_is_drifted(rollout) for rollout in rollouts)
    has_kept = any(branch.kept_mass for _, branch in rows)
    none = torch.zeros(int(mask.sum()), dtype=torch.bool, device=mask.device)

    def of_tokens(value: Callable[[Rollout, Branch | Rollout, int], Any]) -> Tensor:
        found = [value(r, branch, i) for r, branch in rows for i in range(len(branch.tokens))]
        assert len(found) == len(mask), "the batch holds other rollouts than these"
        return torch.tensor(found, device=mask.device)[mask]

    return GapInputs(
        logp=logp[mask],
        rollout_logp=batch.streams["rollout_logp"][mask],
        is_stale=of_tokens(lambda _, b, i: b.versions[i] != version) if is_old else none,
        is_drifted=of_tokens(lambda r, _b, _i: _is_drifted(r)) if has_drift else None,
        sampled_logp=None if sampled is None else sampled[mask],
        log_kept=of_tokens(lambda _, b, i: _log_kept(b, i)) if has_kept else None,
    )


def worst_tokens(
    rollouts: Sequence[Rollout],
    places: Tensor,
    inputs: GapInputs,
    parts: GapParts,
    *,
    text_of: Callable[[int], str],
) -> list[WorstToken]:
    """The tokens with the largest gaps, the largest first; none where there is no gap.

    `places` says where each token of `inputs` stands in the batch of the rollouts. What was ruled
    out by choice is no part of this gap; `kept_mass` stands beside it.
    """
    gap = (inputs.logp - inputs.rollout_logp).abs()
    sizes, order = gap.topk(min(WORST, len(gap)))
    chosen = [i for size, i in zip(sizes.tolist(), order.tolist(), strict=True) if size != 0]
    if not chosen:
        return []
    rows = [(r, k, branch) for r in rollouts for k, branch in enumerate(r.branches)]
    ends = list(accumulate(len(branch.tokens) for _, _, branch in rows))
    found: list[WorstToken] = []
    for index in chosen:
        place = int(places[index])
        row = bisect_right(ends, place)
        rollout, number, branch = rows[row]
        position = place - (ends[row - 1] if row else 0)
        found.append(
            WorstToken(
                rollout=f"{rollout.group}/{rollout.sample}",
                branch=number,
                position=position,
                token=branch.tokens[position],
                text=text_of(branch.tokens[position]),
                version=branch.versions[position],
                trainer=float(inputs.logp[index]),
                sampler=float(inputs.rollout_logp[index]),
                kept_mass=branch.kept_mass[position] if branch.kept_mass else None,
                part=largest_part(parts, index),
            )
        )
    return found


def _is_drifted(rollout: Rollout) -> bool:
    return rollout.notes.get("drift", 0.0) > 0


def _log_kept(branch: Branch | Rollout, position: int) -> float:
    mass = branch.kept_mass[position] if branch.kept_mass else None
    # A sum of probabilities may exceed 1 by a rounding.
    return 0.0 if mass is None else math.log(min(mass, 1.0))
