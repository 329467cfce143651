"""The load-balance loss of a mixture: transformers' own, and one for every split of a step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from luyen.algorithms.expert_balance import load_metrics
from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import MicroBatching, PackedBatch, pack
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import UpdateResult
from tests.tiny_models import tiny_net, tiny_policy
from tests.unit.engine.steps import OPTIM, PASSES, recorded

BALANCED = Objective(loss="vanilla", router_aux_loss_coef=0.7)
KINDS = {"mixtral": (4, 2), "qwen2_moe": (8, 3), "qwen3_moe": (8, 3)}
"""Experts, and how many of them a token has."""


def engine(kind: str, passes: MicroBatching, *, is_checkpointed: bool = False) -> ActorEngine:
    policy = tiny_policy(kind, initializer_range=0.1)
    if is_checkpointed:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = MasterOptimizer(policy.parameters(), OPTIM)
    return ActorEngine(policy, optimizer, passes, temperature=1.0)


def updated(actor: ActorEngine, batch: PackedBatch, objective: Objective) -> UpdateResult:
    return actor.update(batch, objective, lr=0.01, seed=0)


def plain_balance(kind: str, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The loss of transformers over the padded batch, and the norm of its gradient."""
    net = tiny_net(kind, initializer_range=0.1)
    parts = batch.tokens.split(list(batch.lengths))
    rows = pad_sequence(list(parts), batch_first=True)
    mask = pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
    out = net(input_ids=rows, attention_mask=mask, output_router_logits=True, use_cache=False)
    experts, k = KINDS[kind]
    loss: Any = load_balancing_loss_func(out.router_logits, experts, k, mask)
    loss.backward()
    slopes = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(slopes).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_transformers(kind: str):
    batch = recorded()
    still = batch.with_streams(advantages=torch.zeros(len(batch.tokens)))
    loss, norm = plain_balance(kind, batch)
    found = updated(engine(kind, PASSES["three at once"]), still, BALANCED)
    assert found.metrics["router/aux_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert found.stepped.grad_norm == pytest.approx(0.7 * float(norm), rel=1e-4)
    assert found.stepped.grad_norm > 0.01


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_split_of_a_step_has_one_gradient(kind: str, is_checkpointed: bool):
    batch = recorded()
    whole = engine(kind, PASSES["all at once"])
    wanted = updated(whole, batch, BALANCED)
    plain = updated(engine(kind, PASSES["all at once"]), batch, Objective(loss="vanilla"))
    assert plain.stepped.grad_norm != pytest.approx(wanted.stepped.grad_norm, rel=1e-3)
    assert "router/aux_loss" not in plain.metrics
    for name in ("one by one", "by tokens"):
        actor = engine(kind, PASSES[name], is_checkpointed=is_checkpointed)
        found = updated(actor, batch, BALANCED)
        assert found.stepped.grad_norm == pytest.approx(wanted.stepped.grad_norm, rel=1e-5)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-6)


def test_a_prompt_counts_for_each_sequence_that_begins_with_it():
    prompt, ends = [5, 9, 7, 11], ([20, 21, 22], [30], [40, 41])
    sequences = [[*prompt, *end] for end in ends]
    masks = [[0] * 4 + [1] * len(end) for end in ends]
    batch = pack(sequences, masks=masks, groups=[0, 0, 0])
    together, apart = (
        engine("mixtral", passes).update(
            batch.with_streams(advantages=torch.ones(18)), BALANCED, lr=0.01, seed=0
        )
        for passes in (PASSES["all at once"], PASSES["one by one"])
    )
    assert together.metrics == pytest.approx(apart.metrics, rel=1e-5)
    assert together.stepped.grad_norm == pytest.approx(apart.stepped.grad_norm, rel=1e-5)
    loss, _ = plain_balance("mixtral", batch)
    assert together.metrics["router/aux_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_loads_are_measured_without_the_loss():
    found = updated(engine("qwen3_moe", PASSES["by tokens"]), recorded(), Objective(loss="vanilla"))
    assert 1 <= found.metrics["router/max_load"] <= 8 / 3
    assert 0 < found.metrics["router/load_entropy"] <= 1
    even, full = torch.full((2, 4), 5.0), torch.tensor([[10.0, 0, 0, 0], [10.0, 0, 0, 0]])
    names = ("router/max_load", "router/load_entropy", "router/idle_experts")
    assert load_metrics(even) == pytest.approx(dict(zip(names, (1, 1, 0), strict=True)))
    assert load_metrics(full) == pytest.approx(dict(zip(names, (4, 0, 0.75), strict=True)))


def test_a_model_without_routers_is_refused():
    with pytest.raises(UserError, match="router_aux_loss_coef"):
        updated(engine("llama", PASSES["all at once"]), recorded(), BALANCED)
    with pytest.raises(UserError, match="router_aux_loss_coef"):
        replace(BALANCED, router_aux_loss_coef=-1.0)
