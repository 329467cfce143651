"""One file outside the package adds every kind of part, and a run uses them by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.algorithms.advantages import adv_estimators
from luyen.algorithms.policy_losses import policy_losses
from luyen.data.samplers import samplers
from luyen.rewards.reward_managers import reward_managers
from luyen.rollout.protocol import rollout_engines
from tests.architecture.tree import ROOT
from tests.runs import ACTOR, ROLLOUT, Ran, report_of, same_weights, train

PLUGIN = f"trainer.plugins={ROOT / 'examples' / 'extension' / 'plugin.py'}"
PARTS = {
    "estimator": "algorithm.adv_estimator=group_median",
    "loss": f"{ACTOR}.policy_loss.loss_mode=capped_ratio",
    "reward manager": "reward.reward_manager.name=brief",
    "sampler": "data.sampler.name=short_first",
}
ENGINE = f"{ROLLOUT}.name=one_by_one"
OFF_POLICY = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.clip_ratio=0.001")


REGISTRIES = (adv_estimators, policy_losses, reward_managers, samplers, rollout_engines)


@pytest.fixture(scope="module", autouse=True)
def _plugin_leaves_nothing_behind() -> Iterator[None]:
    """Other tests count what is registered."""
    before = [(dict(r._entries), dict(r._facts)) for r in REGISTRIES]
    yield
    for registry, (entries, facts) in zip(REGISTRIES, before, strict=True):
        registry._entries, registry._facts = entries, facts


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("plain"), *OFF_POLICY)


def test_all_parts_of_a_plugin_work_together(tmp_path: Path):
    done = train(tmp_path, PLUGIN, ENGINE, *OFF_POLICY, *PARTS.values())
    assert all(norm > 0 for norm in done.course("actor/grad_norm"))
    assert done.course("parity/max_gap") == [0.0, 0.0]
    assert all(mean < 0 for mean in done.course("reward/brief/mean"))


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_plugin_changes_the_run(part: str, plain: Ran, tmp_path: Path):
    done = train(tmp_path, PLUGIN, *OFF_POLICY, PARTS[part])
    assert not same_weights(done, plain)


def test_an_engine_that_takes_one_request_at_a_time_changes_nothing(plain: Ran, tmp_path: Path):
    done = train(tmp_path, PLUGIN, *OFF_POLICY, ENGINE)
    assert done.metrics == plain.metrics
    assert same_weights(done, plain)


def test_the_sampler_of_a_plugin_decides_what_is_drawn(tmp_path: Path):
    rows = "data.train_files=arithmetic://sum?digits=2&size=200"
    short = train(tmp_path / "short", PLUGIN, rows, PARTS["sampler"])
    mixed = train(tmp_path / "mixed", PLUGIN, rows)
    assert short.course("prompt_length/mean")[0] < mixed.course("prompt_length/mean")[0]


@pytest.mark.parametrize("part", [*PARTS.values(), ENGINE])
def test_without_the_plugin_its_names_are_refused(part: str, tmp_path: Path):
    report = report_of(tmp_path, part)
    key = part.partition("=")[0]
    assert key in {problem.field for problem in report.problems if problem.severity == "error"}
