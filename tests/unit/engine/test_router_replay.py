"""Router replay: the experts that the sampler chose are those that the trainer's layers use."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.base.records import ExpertRoutes, join_routes
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import REPLAYED_ROUTES, ROUTES, PackedBatch, pack
from luyen.engine.logprobs import score
from luyen.engine.optim import MasterOptimizer
from luyen.models.experts import RoutingLog, recorded_routes, routed_layers
from luyen.models.policy import Policy
from luyen.rollout.protocol import generate
from tests.generation import native, request
from tests.tiny_models import tiny_policy
from tests.unit.engine.steps import OPTIM, PASSES

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe")
CHANGED = "router/changed_routes"
OBJECTIVE = Objective(loss="vanilla", router_aux_loss_coef=0.1)


def policy_of(kind: str) -> Policy:
    return tiny_policy(kind, initializer_range=0.1)


def sampled(kind: str) -> tuple[PackedBatch, Tensor]:
    """What a model sampled, and the experts it chose: two answers to each of three prompts."""
    asked = [request(n, 6, samples=2, ignore_stop=True) for n in (5, 17, 30)]
    engine = native(policy_of(kind), rows=4, records_routes=True)
    found = generate(engine, asked)
    rows = [(one, found[one.id, sample]) for one in asked for sample in range(2)]
    sequences = [[*one.tokens, *done.tokens] for one, done in rows]
    masks = [[0] * len(one.tokens) + [1] * len(done.tokens) for one, done in rows]
    batch = pack(sequences, masks=masks, groups=[0, 0, 1, 1, 2, 2])
    routes = recorded_routes(
        [(done.routes, len(s)) for (_, done), s in zip(rows, sequences, strict=True)]
    )
    assert routes is not None
    logps = torch.tensor([logp for _, done in rows for logp in done.logps])
    weight = torch.arange(float(len(batch.tokens))).cos()
    return batch.with_streams(advantages=weight, rollout_logp=batch.scatter(logps)), routes


def engine(policy: Policy, passes: str) -> ActorEngine:
    optimizer = MasterOptimizer(policy.parameters(), OPTIM)
    return ActorEngine(policy, optimizer, PASSES[passes], temperature=1.0)


def moved(kind: str) -> Policy:
    """A policy whose routers have learned something else since the answers were sampled."""
    policy = policy_of(kind)
    generator = torch.Generator().manual_seed(5)
    for layer in routed_layers(policy.model):
        gate: Any = layer.gate
        gate.weight.data.add_(0.1 * torch.randn(gate.weight.shape, generator=generator))
    return policy


def chosen(log: RoutingLog) -> Tensor:
    return torch.stack([routing.experts for _, routing in sorted(log._layers.items())], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_with_equal_weights_no_bit_changes(kind: str):
    batch, routes = sampled(kind)
    assert routes.dtype == torch.uint8
    ends = torch.tensor(batch.lengths).cumsum(0) - 1
    is_known = torch.ones(len(batch.tokens), dtype=torch.bool).index_fill(0, ends, value=False)
    assert (routes[~is_known] == 255).all(), "the last token of an answer was not read"
    assert (routes[is_known] < 8).all()
    results = {
        name: engine(policy_of(kind), "all at once").update(
            batch if name is None else batch.with_streams(**{name: routes}),
            OBJECTIVE,
            lr=0.01,
            seed=0,
        )
        for name in (None, ROUTES, REPLAYED_ROUTES)
    }
    plain = results[None]
    assert CHANGED not in plain.metrics
    for name in (ROUTES, REPLAYED_ROUTES):
        found = results[name]
        assert found.metrics[CHANGED] == 0
        assert plain.logp is not None
        assert found.logp is not None
        assert torch.equal(found.logp, plain.logp)
        assert found.stepped.grad_norm == plain.stepped.grad_norm
        assert {k: v for k, v in found.metrics.items() if k != CHANGED} == plain.metrics


@pytest.mark.parametrize("kind", KINDS)
def test_with_other_weights_the_recorded_experts_are_used_and_routers_learn(kind: str):
    batch, routes = sampled(kind)
    policy = moved(kind)
    logs = {"own": RoutingLog(routes), "replayed": RoutingLog(routes, is_replayed=True)}
    for log in logs.values():
        policy(batch.tokens, batch.lengths, batch.layout.mask, is_shared=False, routing=log)
    own, used = chosen(logs["own"]), chosen(logs["replayed"])
    is_known = routes[:, 0, 0] != 255
    assert torch.equal(used[is_known], routes[is_known].long())
    differs = (own.sort(-1).values != routes.sort(-1).values).any(-1)[is_known]
    assert 0 < differs.float().mean() < 1
    counted = logs["own"].changed()
    assert counted is not None
    assert [int(n) for n in counted] == [int(differs.sum()), differs.numel()]
    first = engine(moved(kind), "all at once")
    replayed = batch.with_streams(**{REPLAYED_ROUTES: routes})
    found = first.update(replayed, Objective(loss="vanilla"), lr=0.01, seed=0)
    assert 0 < found.metrics[CHANGED] < 1
    fresh, old = moved(kind), first.policy
    for layer, before in zip(routed_layers(old.model), routed_layers(fresh.model), strict=True):
        gates: tuple[Any, Any] = (layer.gate, before.gate)
        assert not torch.equal(gates[0].weight, gates[1].weight), "routers have gradients"


@pytest.mark.parametrize("kind", KINDS)
def test_every_split_of_a_step_replays_alike(kind: str):
    batch, routes = sampled(kind)
    replayed = batch.with_streams(**{REPLAYED_ROUTES: routes})
    wanted = engine(moved(kind), "all at once").update(replayed, OBJECTIVE, lr=0.01, seed=0)
    plain = engine(moved(kind), "all at once").update(batch, OBJECTIVE, lr=0.01, seed=0)
    assert plain.stepped.grad_norm != pytest.approx(wanted.stepped.grad_norm, rel=1e-3)
    for name in ("one by one", "by tokens"):
        actor = engine(moved(kind), name)
        if name == "by tokens":
            actor.policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        found = actor.update(replayed, OBJECTIVE, lr=0.01, seed=0)
        assert found.stepped.grad_norm == pytest.approx(wanted.stepped.grad_norm, rel=1e-5)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_old_log_probabilities_are_those_of_the_recorded_experts(kind: str):
    batch, routes = sampled(kind)
    replayed = batch.with_streams(**{REPLAYED_ROUTES: routes})
    for policy in (policy_of(kind), moved(kind)):
        actor = engine(policy, "all at once")
        old = score(policy, replayed, PASSES["one by one"], temperature=1.0)["logp"]
        found = actor.update(replayed, Objective(loss="vanilla"), lr=0.01, seed=0)
        assert found.logp is not None
        torch.testing.assert_close(found.logp, old, rtol=0, atol=1e-5)
    own = score(moved(kind), batch, PASSES["one by one"], temperature=1.0)["logp"]
    assert (own - old).abs().max() > 1e-3


def test_experts_of_another_model_are_refused():
    batch, routes = sampled("mixtral")
    wrong = batch.with_streams(**{ROUTES: routes})
    with pytest.raises(UserError, match="another number of layers or of experts"):
        engine(policy_of("qwen3_moe"), "all at once").update(wrong, OBJECTIVE, lr=0.01, seed=0)
    with pytest.raises(UserError, match="no routed layers that are known"):
        native(tiny_policy("llama"), records_routes=True)
    one = ExpertRoutes(layers=1, chosen=1, width=1, data=b"\x00")
    with pytest.raises(UserError, match="different routers"):
        recorded_routes([(one, 1), (replace(one, layers=2, data=b"\x00\x01"), 1)])


def test_many_experts_take_two_bytes_and_a_sequence_that_is_read_twice_keeps_the_first():
    policy = tiny_policy("qwen3_moe", num_experts=300, num_experts_per_tok=2)
    asked = request(40, 3, ignore_stop=True)
    done = generate(native(policy, records_routes=True), [asked])[asked.id, 0]
    assert done.routes is not None
    assert (done.routes.layers, done.routes.chosen, done.routes.width) == (2, 2, 2)
    assert done.routes.tokens == 42
    found = recorded_routes([(done.routes, 43)])
    assert found is not None
    assert found.dtype == torch.int16
    assert int(found[:42].max()) > 255
    assert (found[42] == -1).all()
    log = RoutingLog(found)
    tokens = torch.tensor([*asked.tokens, *done.tokens])
    policy(tokens, [43], torch.arange(43) >= 40, routing=log)
    counted = log.changed()
    assert counted is not None
    assert [int(n) for n in counted] == [0, 84]
    first = ExpertRoutes(layers=1, chosen=1, width=1, data=bytes([4, 5]))
    later = replace(first, data=bytes([7, 7, 7]))
    joined = join_routes(first, later)
    assert joined is not None
    assert list(joined.data) == [4, 5, 7]
    assert join_routes(None, later) is later
    assert join_routes(first, None) is first


FORGED = {
    "an expert that there is not": lambda routes: routes.index_fill(0, torch.tensor([0]), 200),
    "one of two": lambda r: torch.stack([r[:, :, 0], torch.full_like(r[:, :, 0], 255)], -1),
    "one twice": lambda routes: routes[:, :, :1].expand(-1, -1, 2).contiguous(),
    "more layers": lambda routes: torch.cat([routes, routes[:, :1]], 1),
    "fewer layers": lambda routes: routes[:, :1],
}


@pytest.mark.parametrize("name", [ROUTES, REPLAYED_ROUTES])
@pytest.mark.parametrize("forged", FORGED)
def test_routes_that_no_sampler_chose_are_refused(forged: str, name: str):
    batch, routes = sampled("mixtral")
    changed = batch.with_streams(**{name: FORGED[forged](routes)})
    with pytest.raises(UserError, match="sampled with"):
        engine(policy_of("mixtral"), "all at once").update(changed, OBJECTIVE, lr=0.01, seed=0)


def test_routes_that_are_longer_than_their_sequence_do_not_shift_those_of_the_next():
    known = ExpertRoutes(layers=1, chosen=2, width=1, data=bytes([3, 0, 1, 2, 1, 0]))
    with pytest.raises(UserError, match="1 tokens more than it has"):
        recorded_routes([(known, 2), (known, 4)])
