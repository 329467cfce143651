"""Every preference loss again, from its formula in plain Python floats, over lists of a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Sums of log-probabilities of two answers, under the policy and the reference."""

    chosen: float
    rejected: float
    ref_chosen: float
    ref_rejected: float
    chosen_tokens: int
    rejected_tokens: int
    margin: float = 0.0

    @property
    def c(self) -> float:
        return self.chosen - self.ref_chosen

    @property
    def r(self) -> float:
        return self.rejected - self.ref_rejected


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One marked answer."""

    logp: float
    ref: float
    good: bool
    ratio: float = 1.0


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def nls(x: float) -> float:
    """-log σ(x)."""
    return math.log1p(math.exp(-x)) if x >= 0 else -x + math.log1p(math.exp(x))


def score(x: float, kind: str = "reverse_kl", coef: float = 0.5) -> float:
    t = math.exp(x)
    if kind == "forward_kl":
        return 1 - 1 / t
    if kind == "js_divergence":
        return math.log(2 * t / (1 + t))
    if kind == "alpha_divergence" and coef != 1:
        return (t ** (coef - 1) - 1) / (coef - 1)
    return x


def scores(p: Pair, hparams: dict[str, Any]) -> tuple[float, float]:
    kind = hparams.get("f_divergence_type", "reverse_kl")
    coef = hparams.get("f_alpha_divergence_coef", 0.5)
    return score(p.c, kind, coef), score(p.r, kind, coef)


def z(p: Pair, hparams: dict[str, Any]) -> float:
    c, r = scores(p, hparams)
    return hparams.get("beta", 0.1) * (c - r) - p.margin


def noisy(x: float, hparams: dict[str, Any]) -> float:
    e = hparams.get("label_smoothing", 0.0)
    return (1 - e) * nls(x) + e * nls(-x)


def robust(p: Pair, **k: Any) -> float:
    e = k.get("label_smoothing", 0.0)
    return ((1 - e) * nls(z(p, k)) - e * nls(-z(p, k))) / (1 - 2 * e)


def exo_pair(p: Pair, **k: Any) -> float:
    e, q = k.get("label_smoothing", 1e-3), sig(z(p, k))
    return q * math.log(q / (1 - e)) + (1 - q) * math.log((1 - q) / e)


def ipo(p: Pair, **k: Any) -> float:
    c, r = scores(p, k)
    return (c / p.chosen_tokens - r / p.rejected_tokens - 1 / (2 * k.get("beta", 0.1))) ** 2


def sigmoid_norm(p: Pair, **k: Any) -> float:
    c, r = scores(p, k)
    return nls(k.get("beta", 0.1) * (c / p.chosen_tokens - r / p.rejected_tokens) - p.margin)


def discopop(p: Pair, **k: Any) -> float:
    x = z(p, k)
    m = sig(x / k.get("discopop_tau", 0.05))
    return (1 - m) * nls(x) + m * math.exp(-x)


def nca_pair(p: Pair, *, beta: float = 0.1) -> float:
    return nls(beta * p.c) + 0.5 * nls(-beta * p.c) + 0.5 * nls(-beta * p.r)


def sppo_hard(p: Pair, *, beta: float = 0.1) -> float:
    return (p.c - 0.5 / beta) ** 2 + (p.r + 0.5 / beta) ** 2


def means(p: Pair) -> tuple[float, float]:
    return p.chosen / p.chosen_tokens, p.rejected / p.rejected_tokens


def odds(p: Pair) -> float:
    a, b = (math.exp(x) for x in means(p))
    return math.log(a / (1 - a)) - math.log(b / (1 - b))


def cpo(p: Pair, **k: Any) -> float:
    return noisy(k.get("beta", 0.1) * (p.chosen - p.rejected), k)


def simpo(p: Pair, **k: Any) -> float:
    a, b = means(p)
    return noisy(k.get("beta", 0.1) * (a - b) - k.get("simpo_gamma", 0.5), k)


def alphapo(p: Pair, **k: Any) -> float:
    alpha = k.get("alpha", 0.25)
    a, b = ((1 - math.exp(x) ** -alpha) / alpha for x in means(p))
    return noisy(k.get("beta", 0.1) * (a - b) - k.get("simpo_gamma", 0.5), k)


ALONE: dict[str, Callable[..., float]] = {
    "sigmoid": lambda p, **k: noisy(z(p, k), k),
    "hinge": lambda p, **k: max(0.0, 1 - z(p, k)),
    "ipo": ipo,
    "sigmoid_norm": sigmoid_norm,
    "robust": robust,
    "exo_pair": exo_pair,
    "discopop": discopop,
    "nca_pair": nca_pair,
    "bco_pair": lambda p, beta=0.1: nls(beta * p.c) + nls(-beta * p.r),
    "sppo_hard": sppo_hard,
    "apo_zero": lambda p, beta=0.1: 1 - sig(beta * p.c) + sig(beta * p.r),
    "apo_down": lambda p, beta=0.1: sig(beta * p.c) + 1 - sig(beta * (p.c - p.r)),
    "cpo": cpo,
    "simpo": simpo,
    "alphapo": alphapo,
    "orpo": lambda p, beta=0.1: beta * nls(odds(p)),
    "sft": lambda p: 0.0,
}
"""Loss of one pair by itself, without a likelihood term."""

LIKELIHOOD = {"orpo": 1.0, "sft": 1.0, "cpo": 1.0, "simpo": 0.0}
"""Default weight of the mean negative log-likelihood per token of the step."""


def pair_step(name: str, pairs: list[Pair], **hparams: Any) -> float:
    """The loss of a step: the mean over its pairs."""
    hparams = dict(hparams)
    if name in ("aot", "aot_unpaired"):
        return transport(name, pairs, hparams)
    likelihood = hparams.pop("cpo_alpha", LIKELIHOOD.get(name, 0.0))
    total = sum(ALONE[name](p, **hparams) for p in pairs) / len(pairs)
    tokens = sum(p.chosen_tokens for p in pairs)
    return total - likelihood * sum(p.chosen for p in pairs) / tokens


def transport(name: str, pairs: list[Pair], hparams: dict[str, Any]) -> float:
    if name == "aot":
        high = sorted(p.chosen - p.rejected for p in pairs)
        low = sorted(p.ref_chosen - p.ref_rejected for p in pairs)
    else:
        high, low = sorted(p.c for p in pairs), sorted(p.r for p in pairs)
    beta = hparams.get("beta", 0.1)
    losses = [noisy(beta * (a - b), hparams) for a, b in zip(high, low, strict=True)]
    return sum(losses) / len(losses)


def answer_step(
    name: str,
    answers: list[Answer],
    others: list[tuple[float, float]],
    *,
    frozen: list[Answer] | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> float:
    """The loss of a step of marked answers; `frozen` are those behind a stopped gradient."""
    shift = 0.0
    if name == "kto":
        shift = beta * max(0.0, sum(a - b for a, b in others) / len(others))
    elif name == "bco":
        seen = frozen or answers
        shift = sum(beta * (a.logp - a.ref) for a in seen) / len(seen)
    total = 0.0
    for a in answers:
        x = beta * (a.logp - a.ref) - shift
        side, weight = (x, desirable_weight) if a.good else (-x, undesirable_weight)
        loss = nls(side) if name == "bco" else 1 - sig(side)
        total += weight * loss * (a.ratio if name == "bco" and not a.good else 1.0)
    return total / len(answers)
