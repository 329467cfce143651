"""A mixture of experts is trained as exactly as a dense model, and its loads are measured."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from luyen.base import process_setup
from luyen.cli.main import app
from luyen.config.catalog import ROUTED_MODELS
from luyen.models.experts import RoutingLog
from luyen.models.policy import Policy
from luyen.rollout.protocol import generate
from luyen.studio.replay.record import ReplayRecord
from tests.foreign_models import mixture
from tests.generation import native, request
from tests.runs import ACTOR, MODEL, ROLLOUT, TINY, same_weights, train
from tests.tiny_models import tiny_policy

OF_A_RANDOM_MODEL = (f"{MODEL}.init", f"{MODEL}.override_config")
WORDS = tuple(word for word in TINY if not word.startswith(OF_A_RANDOM_MODEL))


def test_sampler_and_trainer_agree_and_loads_are_measured(tmp_path: Path):
    model = f"{MODEL}.path={mixture(tmp_path / 'model')}"
    plain = train(tmp_path / "plain", *WORDS, model)
    gaps = plain.course("parity/max_gap")
    assert max(gaps) == 0 if process_setup.is_promised("float32") else max(gaps) < 1e-4
    assert all(1 <= load <= 8 / 3 for load in plain.course("router/max_load"))
    assert all(0 < entropy <= 1 for entropy in plain.course("router/load_entropy"))
    assert "router/aux_loss" not in plain.metrics[0]
    words = (f"{ACTOR}.router_aux_loss_coef=0.5", f"{ACTOR}.ppo_mini_batch_size=2")
    even = train(tmp_path / "even", *WORDS, model, *words)
    assert all(loss > 0 for loss in even.course("router/aux_loss"))
    key = "model.model.layers.0.mlp.gate.weight"
    assert not torch.equal(even.weights[key], plain.weights[key])


REPLAY = (f"{ROLLOUT}.enable_rollout_routing_replay=true", f"{ACTOR}.router_replay.mode=R3")


def test_recorded_experts_change_no_bit_of_what_has_equal_weights(tmp_path: Path):
    model = f"{MODEL}.path={mixture(tmp_path / 'model')}"
    plain = train(tmp_path / "plain", *WORDS, model)
    for name, words in {"measured": REPLAY[:1], "replayed": REPLAY}.items():
        found = train(tmp_path / name, *WORDS, model, *words)
        if process_setup.is_promised("float32"):
            assert found.course("router/changed_routes") == [0, 0]
            assert same_weights(found, plain)
        recorded = ReplayRecord(found.root).step(1).rollouts
        assert recorded
        assert all(one.routes is not None for one in recorded)
        assert {one.routes.tokens - len(one.tokens) for one in recorded if one.routes} == {-1}


def test_recorded_experts_survive_a_restart_and_are_replayed(tmp_path: Path):
    model = f"{MODEL}.path={mixture(tmp_path / 'model')}"
    several = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=0.01")
    words = (*WORDS, model, *several, "trainer.save_freq=1")
    whole = train(tmp_path / "whole", *words, *REPLAY)
    assert max(whole.course("router/changed_routes")) > 0, "weights moved within the step"
    assert not same_weights(whole, train(tmp_path / "own", *words))
    train(tmp_path / "parts", *words, *REPLAY, "trainer.total_training_steps=1")
    assert same_weights(train(tmp_path / "parts", *words, *REPLAY), whole)
    done = CliRunner().invoke(app, ["replay", str(whole.root), "--step", "2"])
    assert done.exit_code == 0, done.output
    assert "As in the run, to the last bit" in done.output


class Notes:
    """What a policy's routers decide in every pass of an engine: `[layer, row, k]` experts."""

    def __init__(self, policy: Policy, patched: pytest.MonkeyPatch) -> None:
        self.passes: list[Tensor] = []
        read = policy.hidden

        def noted(tokens: Tensor, positions: Tensor, context: Any, own: Any = None) -> Tensor:
            assert own is None, "the engine records nothing here"
            log = RoutingLog()
            found = read(tokens, positions, context, log)
            self.passes.append(choices(log))
            return found

        patched.setattr(policy, "hidden", noted)


def choices(log: RoutingLog) -> Tensor:
    return torch.stack([routing.experts for _, routing in sorted(log._layers.items())])


@pytest.mark.skipif(not process_setup.is_promised("float32"), reason="nothing is promised here")
@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_the_trainer_routes_every_token_as_the_sampler_did(kind: str):
    policy, new = tiny_policy(kind), 9
    asked = [request(n, new, samples=2, ignore_stop=True) for n in (5, 33, 70)]
    with pytest.MonkeyPatch.context() as patched:
        notes = Notes(policy, patched)
        found = generate(native(policy, rows=6), asked)
    prompts, *steps = notes.passes
    assert prompts.shape[1] == 5 + 33 + 70
    assert [step.shape[1] for step in steps] == [6] * (new - 1)
    rows = [(one, found[one.id, sample]) for one in asked for sample in range(2)]
    read = prompts.split([len(one.tokens) for one in asked], 1)
    for row, (one, done) in enumerate(rows):
        tokens, before = torch.tensor([*one.tokens, *done.tokens]), len(one.tokens)
        log = RoutingLog()
        mask = torch.arange(len(tokens)) >= before
        policy(tokens, [len(tokens)], mask, routing=log)
        trained = choices(log)
        sampled = torch.cat([read[row // 2], *(step[:, row : row + 1] for step in steps)], 1)
        assert torch.equal(trained[:, :-1], sampled), "the newest token was not read"
        assert len(trained.unique()) > 2


def test_every_model_that_is_said_to_be_read_is_read():
    assert all(tiny_policy(kind).is_routed for kind in ROUTED_MODELS)
