"""The framework and the one-file example are the same algorithm, step by step."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.process_setup import has_mkl, least_rows
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.config.schema.model import ModelConfig
from luyen.engine.actor import ActorEngine, score
from luyen.engine.batch import MicroBatching, PackedBatch, pack
from luyen.engine.optim import MasterOptimizer
from luyen.models.load import load_policy
from luyen.train.advantages import AdvantageConfig, compute_advantages
from tests.architecture.tree import ROOT
from tests.e2e.tiny import random_model

FILE = ROOT / "examples" / "minimal" / "grpo.py"
RULES = AdvantageConfig(
    estimator="grpo", hparams={}, is_group_relative=True, kl_kind=None, correction=None
)
PASSES = MicroBatching(max_tokens=100)
STEPS = 3
WEIGHTS = 1e-6 if has_mkl() else 1e-5
"""Gradients agree to 1e-6, but Adam divides one by its own size: of one that is nearly 0, rounding
is left, and OpenBLAS rounds the two forms of a model less alike than MKL does."""
LOGPS = 2e-5 if least_rows() == 1 else 4e-5
"""The example multiplies few rows as they are, which some processors round unlike many."""


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_grpo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["minimal_grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("minimal") / "model")


def packed(groups: list[Any]) -> PackedBatch:
    """The example's groups as the framework holds them."""
    answers = [
        (index, group.prompt.tolist(), row[real].tolist(), old[real].tolist(), float(reward))
        for index, group in enumerate(groups)
        for row, real, old, reward in zip(
            group.answers, group.mask, group.old_logp, group.rewards, strict=True
        )
    ]
    batch = pack(
        [prompt + answer for _, prompt, answer, _, _ in answers],
        masks=[[0] * len(prompt) + [1] * len(answer) for _, prompt, answer, _, _ in answers],
        groups=[index for index, *_ in answers],
    )
    old = [n for _, prompt, _, logps, _ in answers for n in [*[0.0] * len(prompt), *logps]]
    rewards = [
        n
        for _, prompt, answer, _, reward in answers
        for n in [*[0.0] * (len(prompt) + len(answer) - 1), reward]
    ]
    return batch.with_streams(old_logp=torch.tensor(old), rewards=torch.tensor(rewards))


def gradient_of(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


class Watched:
    """An optimizer that shows the gradient before it takes its step."""

    def __init__(self, optimizer: MasterOptimizer) -> None:
        self.optimizer = optimizer
        self.gradient = torch.empty(0)

    def step(self, lr: float) -> Any:
        self.gradient = torch.cat([m.grad.flatten() for m in self.optimizer.masters])
        return self.optimizer.step(lr)


@torch.no_grad()
def take_over(optimizer: MasterOptimizer, model: torch.nn.Module) -> float:
    """The largest difference of a weight; afterwards there is none.

    The optimizer's masters are fp32, and without this their rounding would grow with every step.
    """
    gap = 0.0
    three = zip(optimizer.parameters, optimizer.masters, model.parameters(), strict=True)
    for parameter, master, theirs in three:
        gap = max(gap, float((parameter - theirs).abs().max()))
        parameter.copy_(theirs)
        master.copy_(theirs)
    return gap


def test_losses_gradients_and_weights_agree_step_by_step(minimal: ModuleType, directory: Path):
    settings = minimal.Settings(
        model=str(directory), prompts=3, n=4, ppo_epochs=2, lr=3e-4, max_response_length=6
    )
    model, tokenizer = minimal.load(settings.model)
    config = ModelConfig(path=str(directory), enable_gradient_checkpointing=False)
    policy = load_policy(config, device="cpu", vocabulary=len(tokenizer))
    # In float64, so that what is left of a difference is not the kernels' rounding.
    model.double(), policy.double()
    theirs = minimal.make_optimizer(model, settings)
    optim = OptimConfig(
        lr=settings.lr, weight_decay=settings.weight_decay, clip_grad=settings.clip_grad
    )
    ours = Watched(MasterOptimizer(policy.parameters(), optim))
    engine: Any = ActorEngine(policy, ours, PASSES, temperature=settings.temperature)  # type: ignore[arg-type]
    pairs, draw = random.Random(0), torch.Generator().manual_seed(0)
    for step in range(STEPS):
        groups = minimal.rollout(model, tokenizer, settings, pairs, draw)
        # Random weights never find a sum: the answers are told apart by their first tokens.
        groups = [g._replace(rewards=g.answers[:, 0].remainder(3).float()) for g in groups]
        batch = compute_advantages(packed(groups), RULES, kl_coef=0.0).batch
        assert float(batch.streams["advantages"].abs().max()) > 0
        for epoch in range(settings.ppo_epochs):
            loss = minimal.backward(model, groups, settings)
            expected = gradient_of(model).clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
            theirs.step()
            theirs.zero_grad(set_to_none=True)
            done = engine.update(batch, Objective(loss="vanilla"), lr=settings.lr, seed=0)
            where = f"step {step}, epoch {epoch}"
            assert abs(done.metrics["actor/pg_loss"] - loss) < 1e-6, where
            gap = (ours.gradient - expected).norm() / expected.norm()
            assert gap < 1e-6, f"{where}: {gap}"
            assert take_over(ours.optimizer, model) < WEIGHTS, where


def test_the_example_drew_with_the_log_probabilities_that_the_framework_finds(
    minimal: ModuleType, directory: Path
):
    settings = minimal.Settings(model=str(directory), prompts=3, n=4, temperature=0.7)
    model, tokenizer = minimal.load(settings.model)
    draw = torch.Generator().manual_seed(0)
    batch = packed(minimal.rollout(model, tokenizer, settings, random.Random(0), draw))
    config = ModelConfig(path=str(directory), enable_gradient_checkpointing=False)
    policy = load_policy(config, device="cpu", vocabulary=len(tokenizer))
    found = score(policy, batch, PASSES, temperature=0.7)["logp"]
    torch.testing.assert_close(found, batch.streams["old_logp"], rtol=0, atol=LOGPS)


def test_another_clip_range_would_be_noticed(minimal: ModuleType, directory: Path):
    settings = minimal.Settings(model=str(directory), prompts=2, n=4)
    logp, old = torch.tensor([[0.3]]), torch.tensor([[0.0]])
    wide = replace(settings, clip_ratio_high=1.0)
    losses = [minimal.clipped_losses(logp, old, torch.ones(1, 1), s) for s in (settings, wide)]
    assert float(losses[0]) == pytest.approx(-1.2)
    assert float(losses[1]) == pytest.approx(-(2.718281828**0.3))


def test_the_example_runs(minimal: ModuleType, directory: Path, capsys: pytest.CaptureFixture[str]):
    settings = minimal.Settings(model=str(directory), steps=2, prompts=2, n=2)
    assert len(minimal.train(settings)) == 2
    assert "step 2/2" in capsys.readouterr().out


def test_the_example_is_one_short_file():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 250
    own = [line for line in text.splitlines() if line.startswith("from luyen")]
    assert own == ["from luyen.models.load import model_directory"]
