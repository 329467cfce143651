"""Clip-Cov and KL-Cov: hold back tokens that drive entropy down (arXiv:2505.22617).

Where the advantage and the log-probability are high together, an update sharpens the policy. Both
losses pick such tokens over the whole optimizer step, in a statistics pass of the same name that
runs before the micro-batches.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.checks import require_not_negative
from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses.clipped import pessimistic
from luyen.algorithms.policy_losses.inputs import (
    PolicyInputs,
    TokenLoss,
    clip_range,
    corrected,
    fraction,
    loss_statistics,
    policy_losses,
    ppo_kl,
    token_ratio,
)
from luyen.base.errors import UserError

# Choosing tokens over a whole optimizer step, blind to the order in which they are packed.
#
# A token is known by a 64-bit key that does not depend on its place in the step, and every
# choice is a function of keys and of statistics summed in sorted order. So any permutation of
# the sequences, or any fully masked sequence added, selects the same tokens bit for bit.


def _signed(bits: int) -> int:
    """A 64-bit pattern as the int64 with the same bits."""
    return (bits + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shifted(x: Int[Tensor, " n"], bits: int) -> Int[Tensor, " n"]:
    """Logical right shift: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def scramble(x: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The SplitMix64 finaliser (Steele et al. 2014): a bijection of int64 that looks random."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def shuffled_keys(keys: Int[Tensor, " tok"], seed: int) -> Int[Tensor, " tok"]:
    """A number per key that looks random and depends on nothing but the key and the seed."""
    salt = scramble(torch.tensor([_signed(seed)], dtype=torch.int64, device=keys.device))
    return scramble(keys ^ salt)


def token_keys(inputs: PolicyInputs) -> Int[Tensor, " tok"]:
    """`statistics["token_key"]` if the caller named its tokens, else a key from their content.

    The content is log π, log π_old, the advantage, the rank among the trainable tokens of the
    sequence, and the same of all its sisters: two tokens share a key only if their whole sequences
    hold the same numbers.
    """
    if "token_key" in inputs.statistics:
        return inputs.statistics["token_key"].long()
    layout = inputs.layout
    key = _ranks(layout)
    for stream in (inputs.logp, inputs.old_logp, inputs.advantages):
        bits = (stream.detach().double() + 0.0).view(torch.int64)
        key = scramble(key ^ bits)
    key = torch.where(layout.mask, key, 0)
    zeros = torch.zeros(layout.num_sequences, dtype=torch.int64, device=key.device)
    whole = zeros.index_add(0, layout.segment, key)
    return scramble(key ^ scramble(whole)[layout.segment])


def _ranks(layout: Layout) -> Int[Tensor, " tok"]:
    """How many trainable tokens of its sequence stand at or before each token."""
    running = torch.cat([layout.mask.new_zeros(1).long(), layout.mask.long().cumsum(0)])
    return running[1:] - running[layout.offsets[:-1]][layout.segment]


def covariance(inputs: PolicyInputs) -> Float[Tensor, " tok"]:
    """(A - mean A)(log π - mean log π), means over all trainable tokens of the step; float64."""
    mask = inputs.layout.mask
    advantages, logp = inputs.advantages.detach().double(), inputs.logp.detach().double()
    return (advantages - _ordered_mean(advantages, mask)) * (logp - _ordered_mean(logp, mask))


def _ordered_mean(x: Float[Tensor, " tok"], mask: Bool[Tensor, " tok"]) -> Float[Tensor, ""]:
    """Mean of x where mask is True, summed in sorted order: the same bits for any permutation."""
    kept = x[mask].sort().values
    return kept.sum() / max(kept.numel(), 1)


def selection_size(ratio: float, mask: Bool[Tensor, " tok"]) -> int:
    """How many tokens a share of the trainable tokens is: rounded down, and at least 1."""
    return max(int(ratio * int(mask.sum())), 1)


def first_by(
    order: tuple[Tensor, ...], eligible: Bool[Tensor, " tok"], count: int
) -> Bool[Tensor, " tok"]:
    """The `count` eligible tokens that come first by the columns of `order`, smallest first.

    Tokens that tie in every column with the last one chosen are chosen with it, so the choice
    never depends on packing.
    """
    index = eligible.nonzero().flatten()
    for column in reversed(order):
        index = index[column[index].argsort(stable=True)]
    if index.numel() == 0:
        return torch.zeros_like(eligible)
    last = index[min(count, index.numel()) - 1]
    tied = eligible.clone()
    for column in order:
        tied &= column == column[last]
    chosen = tied.clone()
    chosen[index[:count]] = True
    return chosen


def _require_share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        why = "it is a share of the tokens of a step"
        raise UserError(name, value, why, f"choose 0 < {name} <= 1")


def _selected(inputs: PolicyInputs, loss: str) -> Bool[Tensor, " tok"]:
    """The tokens that the statistics pass chose."""
    if "selected" not in inputs.statistics:
        why = f"loss `{loss}` chooses tokens over the whole step, and no choice was made"
        fix = "run the statistics pass first and pass its streams as PolicyInputs.statistics"
        raise UserError("statistics", sorted(inputs.statistics), why, fix)
    return inputs.statistics["selected"].bool() & inputs.layout.mask


@loss_statistics.register("clip_cov")
def choose_clip_cov(
    inputs: PolicyInputs,
    *,
    seed: int,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Mapping[str, Bool[Tensor, " tok"]]:
    """A random share of the unclipped tokens with clip_cov_lb < covariance < clip_cov_ub.

    The choice is a function of the seed and of each token's key (`token_keys`).
    """
    _require_share("clip_cov_ratio", clip_cov_ratio)
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = token_ratio(inputs.logp.detach(), inputs.old_logp)
    plain, clipped = pessimistic(ratio, inputs.advantages, low=low, high=high)
    cov = covariance(inputs)
    eligible = (cov > clip_cov_lb) & (cov < clip_cov_ub) & ~(clipped > plain) & inputs.layout.mask
    random_keys = shuffled_keys(token_keys(inputs), seed)
    return {
        "selected": first_by(
            (random_keys,), eligible, selection_size(clip_cov_ratio, inputs.layout.mask)
        )
    }


@policy_losses.register("clip_cov")
def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate with the selected tokens taken out of the loss."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    selected = _selected(inputs, "clip_cov")
    ratio = token_ratio(inputs.logp, inputs.old_logp)
    plain, clipped = pessimistic(ratio, inputs.advantages, low=low, high=high)
    per_token = torch.where(selected, 0.0, torch.maximum(plain, clipped))
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/pg_clipfrac": fraction(clipped > plain, inputs),
        "actor/clip_cov_selected_fraction": fraction(selected, inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@loss_statistics.register("kl_cov")
def choose_kl_cov(
    inputs: PolicyInputs, *, seed: int, kl_cov_ratio: float = 0.0002
) -> Mapping[str, Bool[Tensor, " tok"]]:
    """The share of the tokens with the largest covariance; ties go by key, so nothing is random."""
    del seed
    _require_share("kl_cov_ratio", kl_cov_ratio)
    mask = inputs.layout.mask
    order = (-covariance(inputs), token_keys(inputs))
    return {"selected": first_by(order, mask, selection_size(kl_cov_ratio, mask))}


@policy_losses.register("kl_cov")
def kl_cov(inputs: PolicyInputs, *, ppo_kl_coef: float = 0.1) -> TokenLoss:
    """-A·r, plus ppo_kl_coef·|ρ| on the selected tokens; no clip, and no clamp of the ratio."""
    require_not_negative("ppo_kl_coef", ppo_kl_coef)
    selected = _selected(inputs, "kl_cov")
    log_ratio = inputs.logp - inputs.old_logp
    penalty = torch.where(selected, ppo_kl_coef * log_ratio.abs(), 0.0)
    per_token = penalty - inputs.advantages * log_ratio.exp()
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/kl_cov_selected_fraction": fraction(selected, inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)
