"""Every policy loss again, written from its formula in plain Python floats, one sequence at a time.

`live` are the log-probabilities that may be perturbed; `frozen` are the same numbers wherever the
formula stops the gradient, so finite differences over `live` see what autograd should.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """The constants of one sequence; every token of it trains."""

    old: list[float]
    adv: list[float]
    roll: list[float]
    weight: list[float] | None = None
    selected: list[bool] | None = None
    norm: float = 1.0


Scalar = Callable[..., list[float]]


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def sides(clip_ratio: float = 0.2, low: float | None = None, high: float | None = None):
    return (clip_ratio if low is None else low), (clip_ratio if high is None else high)


def knob_sides(hparams: dict[str, Any]) -> tuple[float, float]:
    return sides(
        hparams.get("clip_ratio", 0.2),
        hparams.get("clip_ratio_low"),
        hparams.get("clip_ratio_high"),
    )


def weighted(losses: list[float], row: Row) -> list[float]:
    if row.weight is None:
        return losses
    return [x * w for x, w in zip(losses, row.weight, strict=True)]


def vanilla(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    low, high = knob_sides(hparams)
    out: list[float] = []
    for x, old, a in zip(live, row.old, row.adv, strict=True):
        r = math.exp(clamp(x - old, -20, 20))
        free = min(r, hparams.get("ratio_cap") or math.inf)
        value = max(-a * free, -a * clamp(r, 1 - low, 1 + high))
        out.append(min(value, -a * hparams.get("clip_ratio_c", 3.0)) if a < 0 else value)
    return weighted(out, row)


def gspo(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    low, high = knob_sides(hparams)
    centre = mean([x - old for x, old in zip(frozen, row.old, strict=True)])
    out: list[float] = []
    for x, x0, a in zip(live, frozen, row.adv, strict=True):
        s = math.exp(min(centre + x - x0, 10.0))
        free = min(s, hparams.get("ratio_cap") or math.inf)
        out.append(max(-a * free, -a * clamp(s, 1 - low, 1 + high)))
    return weighted(out, row)


def geo_mean(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    low, high = knob_sides(hparams)
    kept: list[float] = []
    for x, old, a in zip(live, row.old, row.adv, strict=True):
        rho = x - old
        if a > 0:
            kept.append(min(rho, high))
        elif a < 0:
            kept.append(max(rho, -low))
        else:
            kept.append(0.0)
    value = -mean(row.adv) * math.exp(mean(kept))
    if row.weight is not None:
        value *= math.exp(mean([math.log(w + 1e-10) for w in row.weight]))
    return [value] * len(live)


def gpg(live: list[float], frozen: list[float], row: Row) -> list[float]:
    return weighted([-a * x for x, a in zip(live, row.adv, strict=True)], row)


def cispo(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    low, high = knob_sides(hparams)
    cap = hparams.get("cispo_cap")
    out: list[float] = []
    for x, x0, old, a in zip(live, frozen, row.old, row.adv, strict=True):
        r = math.exp(clamp(x0 - old, -20, 20))
        out.append(-(clamp(r, 1 - low, 1 + high) if cap is None else min(r, cap)) * a * x)
    return weighted(out, row)


def sapo(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    out: list[float] = []
    for x, old, a in zip(live, row.old, row.adv, strict=True):
        tau = hparams.get("tau_pos", 1.0) if a > 0 else hparams.get("tau_neg", 1.05)
        r = math.exp(clamp(x - old, -20, 20))
        out.append(-a * 4 / tau / (1 + math.exp(-tau * (r - 1))))
    return weighted(out, row)


def dro(live: list[float], frozen: list[float], row: Row, *, dro_beta: float) -> list[float]:
    pairs = zip(live, row.old, row.adv, strict=True)
    return weighted([-(a * x - 0.5 * dro_beta * (x - old) ** 2) for x, old, a in pairs], row)


def vespo(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    floor = math.log(1e-8)
    log_w = sum(clamp(x - old, -20, 20) for x, old in zip(frozen, row.old, strict=True))
    if row.weight is not None:
        log_w += sum(clamp(math.log(w), floor, 20) for w in row.weight)
    log_w = clamp(log_w, floor, 20)
    out: list[float] = []
    for x, a in zip(live, row.adv, strict=True):
        side = "pos" if a >= 0 else "neg"
        k = hparams.get(f"vespo_k_{side}", {"pos": 2.0, "neg": 3.0}[side])
        rate = hparams.get(f"vespo_lambda_{side}", {"pos": 3.0, "neg": 2.0}[side])
        out.append(-math.exp(rate + k * log_w - rate * math.exp(log_w)) * a * x)
    return out


def truncated(live: list[float], frozen: list[float], row: Row, inside: Scalar, **hparams: Any):
    low, high = knob_sides(hparams)
    out: list[float] = []
    for x, x0, old, a in zip(live, frozen, row.old, row.adv, strict=True):
        r = min(math.exp(clamp(x0 - old, -20, 20)), hparams.get("clip_ratio_c", 20.0))
        out.append(-a * r * x if inside(math.exp(x0), math.exp(old), a, low, high) else 0.0)
    return weighted(out, row)


def tv_inside(p: float, q: float, a: float, low: float, high: float) -> bool:
    return p - q <= high if a > 0 else p - q >= -low


def kl_inside(p: float, q: float, a: float, low: float, high: float) -> bool:
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (kl <= high or p <= q) if a > 0 else (kl <= low or p >= q)


def dppo_tv(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    return truncated(live, frozen, row, tv_inside, **hparams)


def dppo_kl(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    return truncated(live, frozen, row, kl_inside, **hparams)


def clip_cov(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    assert row.selected is not None
    low, high = knob_sides(hparams)
    out: list[float] = []
    for x, old, a, chosen in zip(live, row.old, row.adv, row.selected, strict=True):
        r = math.exp(clamp(x - old, -20, 20))
        out.append(0.0 if chosen else max(-a * r, -a * clamp(r, 1 - low, 1 + high)))
    return weighted(out, row)


def kl_cov(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    assert row.selected is not None
    coef = hparams.get("ppo_kl_coef", 0.1)
    out: list[float] = []
    for x, old, a, chosen in zip(live, row.old, row.adv, row.selected, strict=True):
        out.append(-a * math.exp(x - old) + (coef * abs(x - old) if chosen else 0.0))
    return weighted(out, row)


def bypass_weights(moved: list[float], hparams: dict[str, Any]) -> list[float]:
    """Importance weights by level, truncated or banded."""
    level, limit = hparams["rollout_is"], hparams.get("rollout_is_threshold", 2.0)
    raw = {
        "token": [math.exp(m) for m in moved],
        "sequence": [math.exp(sum(moved))] * len(moved),
        "geometric": [math.exp(mean(moved))] * len(moved),
    }[level]
    if isinstance(limit, str):
        low, high = (float(x) for x in limit.split("_"))
        return [w if low <= w <= high else 0.0 for w in raw]
    return [max(min(w, limit), hparams.get("rollout_is_floor") or 0.0) for w in raw]


def bypass_keep(moved: list[float], hparams: dict[str, Any]) -> list[bool]:
    """Tokens that pass `token_k2` or `seq_mean_k3` under an upper bound."""
    rule, bound = hparams.get("rollout_rs"), hparams.get("rollout_rs_threshold")
    if rule == "token_k2":
        return [0.5 * m * m <= bound for m in moved]
    if rule == "seq_mean_k3":
        return [mean([math.exp(m) - 1 - m for m in moved]) <= bound] * len(moved)
    return [True] * len(moved)


def bypass_mode(live: list[float], frozen: list[float], row: Row, **hparams: Any) -> list[float]:
    moved = [x - r for x, r in zip(frozen, row.roll, strict=True)]
    if hparams["loss_type"] == "reinforce":
        weights = (
            bypass_weights(moved, hparams) if hparams.get("rollout_is") else [1.0] * len(moved)
        )
        losses = [-w / row.norm * a * x for w, a, x in zip(weights, row.adv, live, strict=True)]
    else:
        bare = Row(old=row.roll, adv=row.adv, roll=row.roll)
        losses = vanilla(live, frozen, bare, **hparams)
    keep = bypass_keep(moved, hparams)
    return [x if kept else 0.0 for x, kept in zip(losses, keep, strict=True)]


SCALAR: dict[str, Scalar] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "gspo_token": gspo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "reinforce": gpg,
    "cispo": cispo,
    "sapo": sapo,
    "dro": dro,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "bypass_mode": bypass_mode,
}
