"""An engine that would draw with other weights than the trainer's stops the run and says which."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.models.weights import Fingerprint
from luyen.rollout.native.engine import NativeEngine
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from tests.runs import CHATTY, MODEL, close, prepare, rollout_of, worker_of

LORA = (f"{MODEL}.lora_rank=4",)


def copied(run: OnlineRun) -> NativeEngine:
    """An engine over a copy of the policy, which nobody brings up to date."""
    return NativeEngine(
        copy.deepcopy(worker_of(run).actor.policy),
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        decode=lambda _: "",
    )


def carried_out(run: OnlineRun) -> str:
    """What stopped the run; empty when nothing did."""
    try:
        train_online(run)
    except UserError as error:
        return error.why
    finally:
        close(run)
    return ""


@pytest.mark.parametrize("overrides", [(), LORA, CHATTY], ids=["plain", "lora", "tools"])
def test_an_engine_with_the_trainers_own_weights_is_checked_and_goes_on(
    overrides: tuple[str, ...], tmp_path: Path
):
    run = prepare(tmp_path, *overrides)
    assert carried_out(run) == ""
    assert rollout_of(run).weight_checks == 2


@pytest.mark.parametrize("overrides", [(), LORA], ids=["plain", "lora"])
def test_a_stale_copy_is_found_before_it_draws(overrides: tuple[str, ...], tmp_path: Path):
    run = prepare(tmp_path, *overrides)
    rollout_of(run).engine = copied(run)
    said = carried_out(run)
    assert "version 1 of the weights" in said
    assert "has other values" in said
    assert run.step == 1, "the first step drew with weights that were still equal"
    names = {name for name, p in worker_of(run).actor.policy.named_parameters() if p.requires_grad}
    assert said.partition(": ")[2].split()[0] in names
    assert ("lora" in said) == (overrides == LORA)


def test_another_adapter_is_found(tmp_path: Path):
    run = prepare(tmp_path, *LORA)
    engine = copied(run)
    name, weight = next(iter(Fingerprint.of(engine._policy).weights.items()))
    assert "lora_A" in name
    assert isinstance(weight, torch.Tensor)
    weight += 0.5
    rollout_of(run).engine = engine
    assert f"{name} has other values" in carried_out(run)
    assert run.step == 0


def test_an_adapter_that_was_not_delivered_is_found(tmp_path: Path):
    run = prepare(tmp_path, *LORA)
    engine = copied(run)
    for parameter in engine._policy.parameters():
        parameter.requires_grad_(False)
    rollout_of(run).engine = engine
    assert "is missing" in carried_out(run)


def test_an_engine_that_cannot_say_is_believed(tmp_path: Path):
    run = prepare(tmp_path)
    engine: Any = copied(run)
    engine.fingerprint = lambda: None
    rollout_of(run).engine = engine
    assert carried_out(run) == ""
    assert rollout_of(run).weight_checks == 0
