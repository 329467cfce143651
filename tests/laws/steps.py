"""Random optimizer steps as lists of sequences, to be packed, split, shuffled or poisoned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.layout import Layout
from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import PolicyInputs

STREAMS = ("logp", "old_logp", "advantages", "rollout_logp", "is_weights", "ref_logp")
Sample = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss with knobs that make its clips, masks and selections act on random numbers."""

    loss: str
    hparams: Mapping[str, Any]

    def __str__(self) -> str:
        return self.loss + ("" if self.loss != "bypass_mode" else "-" + self.hparams["loss_type"])


CASES = [
    Case(loss="vanilla", hparams={"clip_ratio_low": 0.1, "clip_ratio_c": 1.3, "ratio_cap": 1.8}),
    Case(loss="gspo", hparams={"clip_ratio": 0.05, "ratio_cap": 1.2}),
    Case(loss="gspo_token", hparams={"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    Case(loss="geo_mean", hparams={"clip_ratio": 0.2}),
    Case(loss="gpg", hparams={}),
    Case(loss="reinforce", hparams={}),
    Case(loss="cispo", hparams={"clip_ratio_high": 0.3}),
    Case(loss="sapo", hparams={"tau_pos": 0.9, "tau_neg": 1.3}),
    Case(loss="dro", hparams={"dro_beta": 0.7}),
    Case(loss="vespo", hparams={}),
    Case(loss="dppo_tv", hparams={"clip_ratio": 0.05, "clip_ratio_c": 1.2}),
    Case(loss="dppo_kl", hparams={"clip_ratio": 0.02, "clip_ratio_c": 1.2}),
    Case(
        loss="clip_cov",
        hparams={"clip_cov_ratio": 0.2, "clip_cov_lb": -0.5, "clip_cov_ub": 0.5},
    ),
    Case(loss="kl_cov", hparams={"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.8}),
    Case(
        loss="bypass_mode",
        hparams={
            "loss_type": "reinforce",
            "rollout_is": "sequence",
            "rollout_is_threshold": 1.5,
            "rollout_is_batch_normalize": True,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": 0.15,
        },
    ),
    Case(
        loss="bypass_mode",
        hparams={"loss_type": "ppo_clip", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
    ),
]


def make_sample(generator: torch.Generator, length: int) -> Sample:
    """Numbers of one sequence in float64; a random third of its tokens is masked."""

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(length, generator=generator, dtype=torch.float64)

    logp = -normal(1.0).abs() - 0.05
    return {
        "logp": logp,
        "old_logp": logp + normal(0.4),
        "advantages": normal(1.0),
        "rollout_logp": logp + normal(0.4),
        "is_weights": normal(0.3).exp(),
        "ref_logp": logp + normal(0.5),
        "mask": torch.rand(length, generator=generator) > 0.33,
    }


def make_step(seed: int, lengths: Sequence[int], twins: bool = False) -> list[Sample]:
    """A step; `twins` adds an exact copy of its first sequence."""
    generator = torch.Generator().manual_seed(seed)
    samples = [make_sample(generator, length) for length in lengths]
    return [*samples, {k: v.clone() for k, v in samples[0].items()}] if twins else samples


steps = st.builds(
    make_step,
    st.integers(0, 2**32),
    st.lists(st.integers(1, 7), min_size=2, max_size=6),
    st.booleans(),
)


def pack(samples: Sequence[Sample], statistics: Mapping[str, Tensor] | None = None) -> PolicyInputs:
    """The sequences as one packed batch; log-probabilities become a leaf that takes a gradient."""
    lengths = [0, *(len(s["mask"]) for s in samples)]
    layout = Layout(
        mask=torch.cat([torch.zeros(0, dtype=torch.bool), *(s["mask"] for s in samples)]),
        offsets=torch.tensor(lengths).cumsum(0),
        groups=torch.zeros(len(samples), dtype=torch.int64),
    )
    joined = {name: join(samples, name) for name in STREAMS if name != "ref_logp"}
    return PolicyInputs(layout=layout, statistics=statistics or {}, **joined)


def join(samples: Sequence[Sample], name: str) -> Tensor:
    """One stream of all sequences, one after the other."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(s[name] for s in samples)])


def evaluate(
    objective: Objective, samples: list[Sample], parts: Sequence[Sequence[int]]
) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradient by sequence) of the step when its sequences are processed in `parts`."""
    whole = pack(samples)
    weights = objective.weights(whole.layout, torch.float64)
    statistics = objective.statistics(whole, seed=3)
    spans = list(
        zip(whole.layout.offsets.tolist(), whole.layout.offsets[1:].tolist(), strict=False)
    )
    total = torch.zeros((), dtype=torch.float64)
    gradients: dict[int, Tensor] = {}
    for part in parts:
        index = torch.cat(
            [torch.zeros(0, dtype=torch.int64), *(torch.arange(*spans[i]) for i in part)]
        )
        leaves = [samples[i]["logp"].clone().requires_grad_() for i in part]
        live = [{**samples[i], "logp": leaf} for i, leaf in zip(part, leaves, strict=True)]
        sliced = {k: v[index] if v.dim() else v for k, v in statistics.items()}
        loss, _ = objective(
            pack(live, sliced),
            weights[index],
            entropy=0.3 - 1.7 * join(live, "logp"),
            ref_logp=join(live, "ref_logp"),
        )
        if leaves:
            for i, grad in zip(part, torch.autograd.grad(loss, leaves), strict=True):
                gradients[i] = grad
        total = total + loss.detach()
    return total, [gradients[i] for i in range(len(samples))]


def same(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> None:
    """Fail unless losses and gradients agree to 1e-12."""
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=1e-12)
    for x, y in zip(a[1], b[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
