"""Random steps of pairs and of marked answers, as records of the package and as plain floats."""

import random
from typing import Any

import torch

from luyen.algorithms.preference import PairInputs, UnpairedInputs
from tests.unit.algorithms.scalar_preference import Answer, Pair

SMALL: list[tuple[str, dict[str, Any]]] = [
    ("sigmoid", {}),
    ("sigmoid", {"beta": 0.5, "label_smoothing": 0.2}),
    ("sigmoid", {"f_divergence_type": "forward_kl"}),
    ("sigmoid", {"f_divergence_type": "js_divergence", "beta": 2.0}),
    ("sigmoid", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}),
    ("sigmoid", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}),
    ("sigmoid_norm", {"beta": 3.0}),
    ("sigmoid_norm", {"f_divergence_type": "js_divergence"}),
    ("hinge", {"beta": 0.7}),
    ("ipo", {"beta": 0.4}),
    ("ipo", {"f_divergence_type": "forward_kl"}),
    ("robust", {"label_smoothing": 0.3, "beta": 0.6}),
    ("exo_pair", {}),
    ("exo_pair", {"label_smoothing": 0.1, "beta": 1.0}),
    ("discopop", {"beta": 0.3}),
    ("discopop", {"beta": 0.3, "discopop_tau": 0.8}),
    ("sft", {}),
    ("nca_pair", {"beta": 0.5}),
    ("bco_pair", {"beta": 0.5}),
    ("sppo_hard", {"beta": 0.5}),
    ("apo_zero", {"beta": 0.5}),
    ("apo_down", {"beta": 0.5}),
    ("aot", {"beta": 0.5, "label_smoothing": 0.1}),
    ("aot_unpaired", {"beta": 0.5}),
    ("orpo", {"beta": 0.4}),
    ("cpo", {}),
    ("cpo", {"cpo_alpha": 0.3, "label_smoothing": 0.1}),
    ("simpo", {"beta": 2.0}),
    ("simpo", {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.5}),
    ("alphapo", {"beta": 2.5, "alpha": 0.25}),
    ("alphapo", {"beta": 2.5, "alpha": -0.5}),
]
"""Pairwise losses with knobs under which every term counts."""

MARKED: list[tuple[str, dict[str, Any]]] = [
    ("kto", {}),
    ("kto", {"beta": 0.6, "desirable_weight": 1.3, "undesirable_weight": 0.4}),
    ("apo_zero_unpaired", {"beta": 0.4, "desirable_weight": 2.0}),
    ("bco", {"beta": 0.4}),
    ("bco", {"beta": 0.4, "undesirable_weight": 0.5}),
]


def label(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


def make_pairs(seed: int, number: int = 5) -> list[Pair]:
    draw = random.Random(seed)
    pairs: list[Pair] = []
    for _ in range(number):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        chosen, rejected = -a * draw.uniform(0.1, 2.0), -b * draw.uniform(0.1, 2.0)
        pairs.append(
            Pair(
                chosen=chosen,
                rejected=rejected,
                ref_chosen=chosen + draw.gauss(0, 1.5),
                ref_rejected=rejected + draw.gauss(0, 1.5),
                chosen_tokens=a,
                rejected_tokens=b,
            )
        )
    return pairs


def make_answers(seed: int, number: int = 6) -> list[Answer]:
    draw = random.Random(seed)
    out: list[Answer] = []
    for i in range(number):
        logp = -draw.uniform(0.5, 9.0)
        ratio = draw.uniform(0.2, 2.0)
        out.append(Answer(logp=logp, ref=logp + draw.gauss(0, 2), good=i % 3 != 0, ratio=ratio))
    return out


def make_others(seed: int, number: int = 4) -> list[tuple[float, float]]:
    draw = random.Random(seed + 1000)
    return [(-draw.uniform(1.0, 4.0), -draw.uniform(3.0, 8.0)) for _ in range(number)]


def numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pair_inputs(pairs: list[Pair], *, margins: bool = False) -> PairInputs:
    """The record of a step, with leaves that ask for gradients."""
    return PairInputs(
        chosen=numbers([p.chosen for p in pairs]).requires_grad_(),
        rejected=numbers([p.rejected for p in pairs]).requires_grad_(),
        ref_chosen=numbers([p.ref_chosen for p in pairs]),
        ref_rejected=numbers([p.ref_rejected for p in pairs]),
        chosen_tokens=torch.tensor([p.chosen_tokens for p in pairs]),
        rejected_tokens=torch.tensor([p.rejected_tokens for p in pairs]),
        margins=numbers([p.margin for p in pairs]) if margins else None,
    )


def answer_inputs(name: str, answers: list[Answer], others: list[tuple[float, float]]):
    """The record of a step of marked answers, with what the loss reads."""
    kto, bco = name == "kto", name == "bco"
    return UnpairedInputs(
        logp=numbers([a.logp for a in answers]).requires_grad_(),
        ref_logp=numbers([a.ref for a in answers]),
        desirable=torch.tensor([a.good for a in answers]),
        mismatched=numbers([a for a, _ in others]) if kto else None,
        ref_mismatched=numbers([b for _, b in others]) if kto else None,
        density_ratio=numbers([a.ratio for a in answers]) if bco else None,
    )
