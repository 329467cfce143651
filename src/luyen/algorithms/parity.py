"""Where the gap between sampler and trainer comes from, token by token.

The gap of a token is the trainer's log-probability minus that of the distribution it was sampled
from. It is the sum of four parts:

- `engine`: the same weights in other code;
- `staleness`: the weights have changed since the token was sampled;
- `drift`: the same weights, in a conversation whose tokens differ from a re-rendering of it;
- `transform`: top-k, top-p and min-p took probability away from other tokens.

All tensors hold sampled tokens only. Arithmetic is in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.correction.importance import LOG_LIMIT

PARTS = ("engine", "staleness", "drift", "transform")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapInputs:
    """What is known about the tokens of a step.

    Example:
        >>> x = torch.tensor([-1.0])
        >>> GapInputs(logp=x, rollout_logp=x, is_stale=torch.tensor([False])).log_kept is None
        True
    """

    logp: Float[Tensor, " tok"]
    """The trainer's log-probability under the present weights."""
    rollout_logp: Float[Tensor, " tok"]
    """The sampler's, before tokens were ruled out."""
    is_stale: Bool[Tensor, " tok"]
    """Whether the token was sampled with other weights than the present ones."""
    is_drifted: Bool[Tensor, " tok"] | None = None
    """Whether its conversation differs from a re-rendering; None: none does."""
    sampled_logp: Float[Tensor, " tok"] | None = None
    """The trainer's under the weights that sampled the token; None: not computed."""
    log_kept: Float[Tensor, " tok"] | None = None
    """Logarithm of the probability that was not ruled out; None: nothing was."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapParts:
    """The gap of every token as a sum, and the tokens on which each part was measured.

    Example:
        >>> x, fresh = torch.tensor([-1.0, -2.0]), torch.tensor([False, False])
        >>> parts = split_gap(GapInputs(logp=x + 0.5, rollout_logp=x, is_stale=fresh))
        >>> parts.values["engine"].tolist(), parts.total.tolist()
        ([0.5, 0.5], [0.5, 0.5])
    """

    values: Mapping[str, Float[Tensor, " tok"]]
    """Each part by name; 0 where it has no share in a token."""
    measured: Mapping[str, Bool[Tensor, " tok"]]
    """Tokens over which the numbers of a part are taken."""

    @property
    def total(self) -> Float[Tensor, " tok"]:
        """The whole gap: the sum of the parts."""
        return torch.stack([self.values[name] for name in PARTS]).sum(0)


def split_gap(inputs: GapInputs) -> GapParts:
    """The gap of each token, attributed.

    What a token of present weights differs by is `engine`, or `drift` in a conversation that
    drifted. On a stale token that much is what `sampled_logp` says; where it is not known, the mean
    over the tokens of present weights stands for it, and the rest is `staleness`.
    """
    gap = inputs.logp.detach().double() - inputs.rollout_logp.detach().double()
    none = torch.zeros_like(gap)
    stale, drifted = inputs.is_stale, inputs.is_drifted
    if drifted is None:
        drifted = torch.zeros_like(stale)
    if inputs.sampled_logp is not None:
        is_known = torch.ones_like(stale)
        on_stale = inputs.sampled_logp.detach().double() - inputs.rollout_logp.detach().double()
    else:
        is_known = ~stale
        fresh = is_known & ~drifted
        count = fresh.sum().clamp(min=1)
        on_stale = (torch.where(fresh, gap, none).sum() / count).expand_as(gap)
    same_weights = torch.where(stale, on_stale, gap)
    has_transform = inputs.log_kept is not None
    kept = inputs.log_kept.detach().double() if inputs.log_kept is not None else none
    return GapParts(
        values={
            "engine": torch.where(drifted, none, same_weights),
            "staleness": gap - same_weights,
            "drift": torch.where(drifted, same_weights, none),
            "transform": kept,
        },
        measured={
            "engine": is_known & ~drifted,
            "staleness": stale,
            "drift": is_known & drifted,
            "transform": torch.full_like(stale, has_transform),
        },
    )


def part_metrics(parts: GapParts) -> dict[str, float]:
    """Size of every part that has tokens, and its share in the sum of all sizes.

    `kl` estimates KL(sampler, trainer) by k3; of `transform` it is the mean of -log of what was
    kept, which is exact.
    """
    sizes = torch.stack([parts.values[name].abs().sum() for name in PARTS])
    shares = sizes / sizes.sum().where(sizes.sum() > 0, torch.ones_like(sizes[0]))
    numbers: dict[str, Tensor] = {}
    for name, share in zip(PARTS, shares, strict=True):
        tokens = parts.values[name][parts.measured[name]]
        if tokens.numel() == 0:
            continue
        size = tokens.abs()
        safe = tokens.clamp(-LOG_LIMIT, LOG_LIMIT)
        k3 = -tokens if name == "transform" else torch.expm1(safe) - safe
        numbers[f"parity/{name}_max"] = size.max()
        numbers[f"parity/{name}_mean"] = size.mean()
        numbers[f"parity/{name}_exact_fraction"] = (tokens == 0).sum().double() / tokens.numel()
        numbers[f"parity/{name}_kl"] = k3.mean()
        numbers[f"parity/{name}_share"] = share
    return {name: float(number) for name, number in numbers.items()}


def largest_part(parts: GapParts, token: int) -> str:
    """The largest part of one token's gap, apart from what was ruled out by choice."""
    names = [name for name in PARTS if name != "transform"]
    return max(names, key=lambda name: float(parts.values[name][token].abs()))
