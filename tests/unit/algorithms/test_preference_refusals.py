"""What makes no sense to a preference loss is refused by the name of the key or the input."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from luyen.algorithms.layout import Layout
from luyen.algorithms.preference import PreferenceObjective
from luyen.algorithms.preference.step import token_weights
from luyen.base.errors import UserError
from tests.unit.algorithms.preference_steps import (
    answer_inputs,
    make_answers,
    make_pairs,
    pair_inputs,
)

PAIRS, ANSWERS = pair_inputs(make_pairs(0)), answer_inputs("bco", make_answers(0), [])
PLAIN = replace(ANSWERS, density_ratio=None)
MATCHED = answer_inputs("kto", make_answers(0), [(0.0, 0.0)])
FREE = replace(PAIRS, ref_chosen=None, ref_rejected=None)
PART = torch.tensor([0, 1])
TOKEN = Layout(mask=torch.tensor([True]), offsets=torch.tensor([0, 1]), groups=torch.tensor([0]))


def run(
    *names: str, of: Any = PAIRS, weights: Any = None, ld: Any = None, **hparams: Any
) -> Callable[[], object]:
    """The evaluation of a loss, to be called later."""

    def call() -> object:
        objective = PreferenceObjective(
            losses=names, loss_weights=weights, hparams=hparams, ld_alpha=ld
        )
        return objective(of)

    return call


REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("preference.loss_type", run("sigmoidal")),
    ("preference.loss_type", run()),
    ("preference.loss_type", run("sigmoid", "kto")),
    ("preference.loss_type", run("kto")),
    ("preference.loss_type", run("sigmoid", of=ANSWERS)),
    ("preference.loss_type", run("aot", of=PAIRS.take(PART))),
    ("preference.loss_type", run("bco", of=ANSWERS.take(PART))),
    ("preference.loss_weights", run("sigmoid", "sft", weights=(1.0,))),
    ("simpo_gamma", run("sigmoid", simpo_gamma=1.0)),
    ("beta", run("sigmoid", beta=0.0)),
    ("beta", run("kto", of=MATCHED, beta=-1.0)),
    ("label_smoothing", run("robust", label_smoothing=0.5)),
    ("label_smoothing", run("exo_pair", label_smoothing=0.0)),
    ("label_smoothing", run("sigmoid", label_smoothing=-0.1)),
    ("discopop_tau", run("discopop", discopop_tau=1.5)),
    ("f_divergence_type", run("sigmoid", f_divergence_type="js")),
    ("f_divergence_type", run("sigmoid", "apo_zero", f_divergence_type="js_divergence")),
    ("cpo_alpha", run("cpo", cpo_alpha=-1.0)),
    ("desirable_weight", run("apo_zero_unpaired", of=PLAIN, desirable_weight=-1.0)),
    ("ref_chosen", run("sigmoid", of=FREE)),
    ("margins", run("ipo", of=replace(PAIRS, margins=PAIRS.chosen))),
    ("density_ratio", run("apo_zero_unpaired", of=ANSWERS)),
    ("mismatched", run("kto", of=PLAIN)),
    ("mismatched", run("apo_zero_unpaired", of=MATCHED)),
    ("ld_alpha", run("sigmoid", "sft", ld=0.5)),
    ("ref_rejected", lambda: replace(PAIRS, ref_rejected=None)),
    ("ref_mismatched", lambda: replace(ANSWERS, mismatched=ANSWERS.logp)),
    ("ld_alpha", lambda: token_weights(TOKEN, torch.tensor([1]), ld_alpha=1.5)),
]


@pytest.mark.parametrize("index", range(len(REFUSALS)))
def test_what_makes_no_sense_is_refused_by_name(index: int):
    field, call = REFUSALS[index]
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.field == field
