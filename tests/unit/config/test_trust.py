"""Which keys of another user's run act: they start code or lead to a server."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from luyen.base.digests import VARIABLE, signed
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.loader.load import load
from luyen.config.loader.one_reading import known_text, one_reading
from luyen.config.loader.parse import parse
from luyen.config.schema.run import RunConfig
from luyen.config.trust import acts_in, require_trust, sign_run

_ROLLOUT = "actor_rollout_ref.rollout"
ACTING: dict[str, Any] = {
    "data.sampler.class_path": "mine.py",
    "data.sampler.kwargs": {"file": "mine.py"},
    f"{_ROLLOUT}.server.python": "/tmp/python",
    f"{_ROLLOUT}.server_urls": ["http://127.0.0.1:1"],
    f"{_ROLLOUT}.engine_kwargs": {"vllm": {"trust_remote_code": True}},
    f"{_ROLLOUT}.multi_turn.tool_config_path": "tools.yaml",
    f"{_ROLLOUT}.multi_turn.function_tool_path": "tools.py",
    f"{_ROLLOUT}.multi_turn.environments": {"mine": {"class_path": "mine.py"}},
    f"{_ROLLOUT}.multi_turn.interaction_config_path": "users.yaml",
    "reward.components": {"kind": {"judge": {"base_url": "http://a/v1", "prompt": "{answer}"}}},
    "reward.routes": {"a": {"kind": {"judge": {"base_url": "http://a/v1", "prompt": "{answer}"}}}},
    "reward.cache.path": "cache.sqlite",
    "reward.custom_reward_function.path": "mine.py",
    "reward.custom_reward_function.reward_kwargs": {"file": "mine.py"},
    "trainer.plugins": ["mine.py"],
}
"""A value of every key of free text that lets a run act."""
READ = """
    data.train_files data.val_files data.train_names data.prompt_key data.system_prompt
    data.prompt_template data.ground_truth_key data.reward_fn_key data.apply_chat_template_kwargs
    data.sampler.class_name actor_rollout_ref.model.path actor_rollout_ref.model.tokenizer_path
    actor_rollout_ref.model.override_config actor_rollout_ref.model.target_modules
    actor_rollout_ref.model.lora_adapter_path actor_rollout_ref.rollout.stop
    actor_rollout_ref.rollout.val_kwargs.stop actor_rollout_ref.rollout.multi_turn.environment
    actor_rollout_ref.ref.path critic.model.path reward.custom_reward_function.name
    reward.reward_model.model_path algorithm.gdpo_reward_keys algorithm.filter_groups.metric
    algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_rs
    algorithm.rollout_correction.rollout_rs_threshold trainer.best_metric
    trainer.early_stopping.metric trainer.resume_from_path trainer.default_local_dir
    trainer.project_name trainer.experiment_name trainer.logger trainer.profile.save_path
    trainer.watchdog.budgets
    preference.loss_type reward_training.target_key distill.teacher_path
""".split()  # noqa: SIM905
"""Keys whose files are read as data, or whose folders are written to; names of columns, metrics."""
NAMES = """
    data.sampler.name actor_rollout_ref.actor.strategy
    actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.kl_loss_type
    actor_rollout_ref.rollout.name actor_rollout_ref.rollout.multi_turn.format
    reward.reward_manager.name reward.reward_model.rollout.name algorithm.adv_estimator
    algorithm.kl_penalty sft.loss
""".split()  # noqa: SIM905
"""Names of registered parts: one that does not come with Luyen needs a plugin."""


def free_keys(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Keys whose value may be any text, or hold some."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from free_keys(kind, f"{before}{name}.")
        elif any(word in str(kind) for word in ("str", "Any")) and "Literal" not in str(kind):
            yield f"{before}{name}"


def tree_of(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_of_every_key_of_free_text_it_is_known_whether_it_acts():
    assert sorted(free_keys(RunConfig)) == sorted([*ACTING, *READ, *NAMES])


@pytest.mark.parametrize("key", ACTING)
def test_a_run_of_another_user_that_acts_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tree = tree_of(key, ACTING[key])
    assert acts_in(RunConfig.model_validate(tree))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    signed({})
    text = yaml.safe_dump(tree)
    run = RunDirectory.create(tmp_path / "run", config=text, provenance={}, manifest={})
    with pytest.raises(UserError, match="not known to be yours"):
        require_trust(run, is_trusted=False)
    require_trust(run, is_trusted=True)


def run_of(text: str, place: Path) -> RunDirectory:
    return RunDirectory.create(place, config=text, provenance={}, manifest={})


def test_what_was_looked_at_is_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    harmless = run_of("trainer: {seed: 1}", tmp_path / "run")
    acting = run_of("trainer: {seed: 2, plugins: [mine.py]}", tmp_path / "other")
    with one_reading():
        require_trust(harmless, is_trusted=False)
        harmless.config.write_bytes(acting.config.read_bytes())  # as its owner could at any moment
        assert parse(load([harmless.config], [])).config.trainer.seed == 1
        with pytest.raises(UserError, match="not known to be yours"):
            require_trust(harmless, is_trusted=False)
        require_trust(harmless, is_trusted=True)
        assert parse(load([harmless.config], [])).config.trainer.seed == 2
    assert known_text(harmless.config) is None


def test_a_run_that_includes_files_is_refused_since_they_could_change_after_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    run = run_of("defaults: [other, _self_]\ntrainer: {seed: 1}", tmp_path / "run")
    (run.root / "other.yaml").write_text("trainer: {project_name: harmless}")
    with one_reading():
        with pytest.raises(UserError, match="includes other files"):
            require_trust(run, is_trusted=False)
        require_trust(run, is_trusted=True)
        assert parse(load([run.config], [])).config.trainer.project_name == "harmless"


def test_a_signed_run_in_the_folder_of_another_user_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    run = run_of("trainer: {plugins: [mine.py]}", tmp_path / "run")
    sign_run(run, RunConfig.model_validate({"trainer": {"plugins": ["mine.py"]}}))
    require_trust(run, is_trusted=False)
    own = os.geteuid()
    monkeypatch.setattr("luyen.config.trust.os.geteuid", lambda: own + 1)
    with pytest.raises(UserError, match="another user"):
        require_trust(run, is_trusted=False)


def test_a_group_is_never_taken_from_the_folder_of_a_run(tmp_path: Path):
    run = run_of("trainer: {seed: 1}", tmp_path / "run")
    (run.root / "learning_rate").mkdir()
    (run.root / "learning_rate" / "high.yaml").write_text("# @package _global_\ntrainer: {seed: 7}")
    assert parse(load([run.config], ["learning_rate=high"])).config.trainer.seed != 7
