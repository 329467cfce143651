"""A mixture of experts is trained as exactly as a dense model, and its loads are measured."""

from pathlib import Path

import torch

from luyen.base import process_setup
from luyen.config.catalog import ROUTED_MODELS
from tests.foreign_models import mixture
from tests.runs import ACTOR, MODEL, TINY, train
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


def test_every_model_that_is_said_to_be_read_is_read():
    assert all(tiny_policy(kind).is_routed for kind in ROUTED_MODELS)
