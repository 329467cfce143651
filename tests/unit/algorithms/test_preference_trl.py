"""The same numbers as TRL under the same names, where TRL is installed.

Its trainers are handed a stand-in for the model and for themselves: only their arithmetic runs.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.algorithms import padded
from luyen.algorithms.distillation import generalised_jsd
from luyen.algorithms.layout import Layout
from luyen.algorithms.preference.step import step_mean
from luyen.algorithms.reward_losses import bradley_terry

pytest.importorskip("trl")

PAIRS, WIDTH = 5, 7


class Rows:
    """Completions of random lengths after a prompt of one token, which TRL's shift removes."""

    def __init__(self, seed: int, rows: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, WIDTH, (rows,), generator=draw)
        self.mask = (torch.arange(WIDTH) < lengths[:, None]).long()
        normal = torch.randn(2, rows, WIDTH, generator=draw)
        self.logp = (-normal[0].abs() - 0.02) * self.mask
        self.ref = (self.logp + 0.8 * normal[1]) * self.mask

    def inputs(self) -> dict[str, Tensor]:
        """What a collator of TRL would give: masks are one position wider than log-probs."""
        prompt = torch.zeros(len(self.mask), 1, dtype=torch.long)
        completion = torch.cat([prompt, self.mask], 1)
        ids = torch.zeros_like(completion)
        return {"input_ids": ids, "attention_mask": completion, "completion_mask": completion}


class Policy(torch.nn.Module):
    """A module that does nothing, in the place that a trainer keeps its model."""

    is_gradient_checkpointing = False


def answer(logp: Tensor) -> SimpleNamespace:
    """What TRL's patched forward returns."""
    nothing = torch.zeros_like(logp)
    return SimpleNamespace(
        log_probs=logp,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
        log_sum_sq_probs=nothing,
    )


def trainer(**fields: Any) -> SimpleNamespace:
    """What the loss functions read of a trainer."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x
    )
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    common = {
        "model": SimpleNamespace(training=False),
        "accelerator": accelerator,
        "_metrics": metrics,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
    }
    return SimpleNamespace(**(common | fields))


def dpo(rows: Rows, losses: list[str], weights: list[float], **hparams: Any) -> float:
    from trl.trainer.dpo_trainer import DPOTrainer

    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "use_weighting": False,
        "precompute_ref_logps": False,
        "args": SimpleNamespace(
            discopop_tau=hparams.pop("discopop_tau", 0.05), gradient_checkpointing_kwargs=None
        ),
    }
    stand_in = trainer(
        **(defaults | hparams),
        loss_types=losses,
        loss_weights=weights,
        model=Policy().eval(),
        ref_model=lambda **_: answer(rows.ref),
    )
    loss = DPOTrainer._compute_loss(stand_in, lambda **_: answer(rows.logp), rows.inputs(), False)
    return float(loss)


def ours(rows: Rows, name: str | list[str], **hparams: Any) -> float:
    half = len(rows.mask) // 2
    loss, _ = padded.preference_loss(
        name,
        rows.logp[:half],
        rows.logp[half:],
        rows.mask[:half],
        rows.mask[half:],
        ref_chosen_logp=rows.ref[:half],
        ref_rejected_logp=rows.ref[half:],
        **hparams,
    )
    return loss.item()


OF_DPO: list[tuple[str, dict[str, Any]]] = [
    ("sigmoid", {}),
    ("sigmoid", {"beta": 0.7, "ld_alpha": 0.3}),
    ("sigmoid", {"f_divergence_type": "forward_kl"}),
    ("sigmoid", {"f_divergence_type": "js_divergence"}),
    ("sigmoid", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}),
    ("hinge", {}),
    ("ipo", {"beta": 0.5}),
    ("ipo", {"beta": 0.5, "f_divergence_type": "js_divergence"}),
    ("exo_pair", {"label_smoothing": 0.01}),
    ("nca_pair", {}),
    ("robust", {"label_smoothing": 0.1}),
    ("bco_pair", {}),
    ("sppo_hard", {}),
    ("aot", {"label_smoothing": 0.1}),
    ("aot_unpaired", {"label_smoothing": 0.1}),
    ("apo_zero", {}),
    ("apo_down", {}),
    ("discopop", {}),
    ("sigmoid_norm", {"beta": 2.0}),
    ("sft", {}),
]


@pytest.mark.parametrize(("name", "hparams"), OF_DPO)
def test_pairwise_losses_agree(name: str, hparams: dict[str, Any]):
    rows = Rows(0, 2 * PAIRS)
    assert ours(rows, name, **hparams) == pytest.approx(
        dpo(rows, [name], [1.0], **hparams), rel=2e-6
    )


def test_a_mixture_agrees():
    rows, names, weights = Rows(1, 2 * PAIRS), ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    found = ours(rows, names, loss_weights=weights, beta=0.3)
    assert found == pytest.approx(dpo(rows, names, weights, beta=0.3), rel=2e-6)


MARKED = {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.7}


def kto(name: str, rows: Rows, other: Rows, good: Tensor) -> float:
    from trl.trainer.kto_trainer import KTOTrainer

    stand_in = trainer(
        **MARKED,
        model=Policy().eval(),
        ref_model=lambda **_: answer(rows.ref),
        loss_type=name,
        calculate_KL=name == "kto",
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )

    def forward(**_: Any) -> SimpleNamespace:
        return answer(rows.logp)

    sums = {True: other.logp.sum(1), False: other.ref.sum(1)}
    stand_in._compute_kl_logps = lambda model, _: sums[model is forward]
    inputs = rows.inputs() | {"label": good}
    return float(KTOTrainer._compute_loss(stand_in, forward, inputs, False))


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_unpaired_losses_agree(name: str):
    rows, other = Rows(2, 6), Rows(3, 6)
    good = torch.tensor([True, False, True, True, False, True])
    # Under the policy the mismatched answers are likelier, so that z is not 0.
    other.logp = other.ref + 0.4 * other.mask
    extra = {
        "mismatched_logp": other.logp,
        "ref_mismatched_logp": other.ref,
        "mismatched_mask": other.mask,
    }
    found, metrics = padded.unpaired_preference_loss(
        name, rows.logp, rows.ref, rows.mask, good, **(extra if name == "kto" else {}), **MARKED
    )
    assert found.item() == pytest.approx(kto(name, rows, other, good), rel=2e-6)
    assert name != "kto" or metrics["preference/kl"] > 0


@pytest.mark.parametrize(
    ("name", "kind", "hparams"),
    [
        ("cpo", "sigmoid", {"beta": 0.3, "label_smoothing": 0.1, "cpo_alpha": 0.6}),
        ("simpo", "simpo", {"beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.6}),
        ("alphapo", "simpo", {"beta": 2.0, "simpo_gamma": 0.7, "alpha": 0.25}),
    ],
)
def test_losses_without_a_reference_agree(name: str, kind: str, hparams: dict[str, Any]):
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    rows = Rows(4, 2 * PAIRS)
    sums, tokens = rows.logp.sum(1), rows.mask.sum(1)
    given = sums / tokens if kind == "simpo" else sums
    fields = {"alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.0} | hparams
    losses, _, _ = CPOTrainer.cpo_loss(
        trainer(loss_type=kind, **fields), given[:PAIRS], given[PAIRS:]
    )
    likelihood = -sums[:PAIRS].sum() / tokens[:PAIRS].sum()
    expected = losses.mean() + hparams.get("cpo_alpha", 0.0) * likelihood
    assert ours(rows, name, **hparams) == pytest.approx(expected.item(), rel=2e-6)


def test_the_odds_term_of_orpo_agrees():
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    rows = Rows(5, 2 * PAIRS)
    sums, tokens = rows.logp.sum(1), rows.mask.sum(1)
    means = sums / tokens
    losses = ORPOTrainer.odds_ratio_loss(trainer(beta=0.4), means[:PAIRS], means[PAIRS:])[0]
    likelihood = -sums[:PAIRS].sum() / tokens[:PAIRS].sum()
    expected = likelihood - losses.mean()
    assert ours(rows, "orpo", beta=0.4) == pytest.approx(expected.item(), rel=2e-6)


def test_reward_models_agree():
    from trl.trainer.reward_trainer import RewardTrainer

    scores = torch.randn(2 * PAIRS, generator=torch.Generator().manual_seed(6))
    margins = torch.rand(PAIRS, generator=torch.Generator().manual_seed(7))
    stand_in = trainer(args=SimpleNamespace(center_rewards_coefficient=0.02))
    inputs = {"margin": margins, "attention_mask": torch.ones(1)}

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=scores[:, None])

    expected = RewardTrainer.compute_loss(stand_in, model, inputs)
    found = bradley_terry(
        scores[:PAIRS], scores[PAIRS:], margins=margins, center_rewards_coefficient=0.02
    )
    assert step_mean(found.loss).item() == pytest.approx(float(expected), rel=2e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_generalised_jsd_agrees(beta: float):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    draw = torch.Generator().manual_seed(8)
    student, teacher = torch.randn(2, 1, 6, 11, generator=draw)
    labels = torch.tensor([[1, -100, 1, 1, -100, 1]])
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
    layout = Layout(mask=labels[0] != -100, offsets=torch.tensor([0, 6]), groups=torch.tensor([0]))
    rows = [torch.log_softmax(x[0], -1) for x in (student, teacher)]
    found = generalised_jsd(rows[0], rows[1], layout, beta=beta)
    assert found.metrics["distill/divergence"].value() == pytest.approx(expected.item(), rel=2e-5)
