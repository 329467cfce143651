"""The whole report: templates that users arrive with, and everything wrong at once."""

from pathlib import Path

import pytest

from luyen.config.check import Report, check
from luyen.config.fields import walk
from luyen.config.machine import Machine

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)

PPO = """
algorithm:
  adv_estimator: gae
  use_kl_in_reward: false

actor_rollout_ref:
  rollout:
    name: native
    n: 1

critic:
  enable: true
"""

GRPO_TOOLS = """
algorithm:
  adv_estimator: grpo

actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.001
  rollout:
    name: native
    n: 8
    multi_turn:
      enable: true
      tool_config_path: /path/to/tools.yaml

data:
  return_raw_chat: true
"""

VERL = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  train_files: ROWS
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  model:
    path: Qwen/Qwen2.5-3B-Instruct
    use_remove_padding: True
    enable_gradient_checkpointing: True
  actor:
    strategy: fsdp
    optim:
      lr: 1e-6
    ppo_mini_batch_size: 256
    use_dynamic_bsz: True
    ppo_max_token_len_per_gpu: ${oc.select:nothing,16384}
    use_kl_loss: True
    kl_loss_type: low_var_kl
    entropy_coeff: 0
  rollout:
    name: native
    mode: async
    n: 8
    gpu_memory_utilization: 0.5
algorithm:
  adv_estimator: grpo
trainer:
  project_name: verl_examples
  experiment_name: gsm8k
  n_gpus_per_node: 8
  logger: [console]
  total_epochs: 15
"""


def report(text: str, tmp_path: Path, *overrides: str) -> Report:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("ROWS", str(rows)))
    return check([path], overrides, machine=LAPTOP, installed=lambda package: False)


def errors(found: Report) -> list[tuple[str, str]]:
    return [(p.id, p.field) for p in found.problems if p.severity == "error"]


def test_the_ppo_template_lacks_nothing_but_its_rows(tmp_path: Path) -> None:
    found = report(PPO, tmp_path)
    assert errors(found) == [("D01", "data.train_files")]
    assert [role.name for role in found.plan.where.roles] == ["actor", "rollout", "critic"]


def test_the_tool_calling_template_lacks_its_rows_and_its_tool_file(tmp_path: Path) -> None:
    found = report(GRPO_TOOLS, tmp_path)
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    assert errors(found) == [("D01", "data.train_files"), ("T05", tools)]
    assert found.config.actor_rollout_ref.rollout.n == 8


def test_a_verl_yaml_passes_as_it_stands(tmp_path: Path) -> None:
    found = report(VERL, tmp_path)
    assert errors(found) == [("S03", "trainer.runtime")], "Ray is not installed"
    assert {p.id for p in found.problems} == {"C012", "S03", "R18", "F09"}
    assert found.config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert found.plan.where.world_size == 8
    assert found.plan.memory is None


@pytest.mark.parametrize("engine", ["trtllm", "tgi"])
def test_an_engine_without_an_adapter_is_refused_until_a_plugin_registers_it(
    engine: str, tmp_path: Path
) -> None:
    name = f"actor_rollout_ref.rollout.name={engine}"
    found = report(VERL, tmp_path, name, "trainer.n_gpus_per_node=1")
    assert errors(found) == [("R01", "actor_rollout_ref.rollout.name")]
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"rollout_engines.register({engine!r}, package='json')(print)\n")
    words = (name, "trainer.n_gpus_per_node=1", f"trainer.plugins={plugin}")
    assert errors(report(VERL, tmp_path, *words)) == [("R02", "actor_rollout_ref.rollout.name")]
    plugin.write_text(f"rollout_engines.register({engine!r})(print)\n")
    assert errors(report(VERL, tmp_path, *words)) == []


def test_everything_wrong_is_in_one_report(tmp_path: Path) -> None:
    text = """
data: {train_files: ROWS, train_batch_sise: 3, truncation: lfet}
actor_rollout_ref:
  actor: {grad_clip: 1.0, clip_ratio: wide}
  rollout: {n: 1}
algorithm: {adv_estimator: rloo}
"""
    found = report(text, tmp_path, "trainer.nnodez=1", "broken")
    ids = [p.id for p in found.problems if p.severity == "error"]
    assert sorted(ids) == ["A02", "C005", "C005", "C006", "C006", "C007", "C011"]
    assert not found.is_sound
    where = {p.field: str(p.origin) for p in found.problems}
    assert where["data.truncation"] == f"{tmp_path / 'run.yaml'}:2"
    assert where["trainer.nnodez"] == "command line"


def test_a_rule_is_silent_about_a_key_that_is_wrong_in_itself() -> None:
    found = check([], ["actor_rollout_ref.rollout.n=many", "algorithm.adv_estimator=grpo"])
    about_n = [p.id for p in found.problems if p.field == "actor_rollout_ref.rollout.n"]
    assert about_n == ["C006"]


def other(default: object) -> str | None:
    """Another value of the same type, where one can be made up."""
    match default:
        case bool():
            return str(not default).lower()
        case int() | float():
            return str(default + 1) if default >= 1 or default == 0 else str(default / 2)
        case str():
            return "other"
        case _:
            return None


@pytest.mark.parametrize("info", [f for f in walk() if f.awaits or f.only], ids=lambda f: f.path)
def test_a_key_that_nothing_reads_is_refused_at_any_other_value(info) -> None:
    words = [choice for choice in info.choices if choice != info.default]
    value = words[0] if words else other(info.default)
    if info.default == {}:
        value = "{a: 1}"
    if info.default == (0.9, 0.999):
        value = "[0.8, 0.9]"
    if info.default is None and not words:
        value = "4096"
    found = check([], [f"{info.path}={value}"], machine=LAPTOP)
    ids = [p.id for p in found.problems if p.field == info.path]
    assert ids == ["C009" if info.awaits else "C010"]
    quiet = check([], [f"{info.path}={_yaml(info.default)}"], machine=LAPTOP)
    assert not [p for p in quiet.problems if p.field == info.path]


def _yaml(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check([], ["data.train_files=arithmetic://sum"])
    assert list(tmp_path.iterdir()) == []


def test_plugin_names_are_known_before_anything_is_imported(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "import torch_that_does_not_exist\n"
        "from luyen.algorithms.advantages import adv_estimators\n"
        "@adv_estimators.register('mine', group_relative=True, baseline='group mean')\n"
        "def mine(inputs): ...\n"
    )
    words = ["algorithm.adv_estimator=mine", f"trainer.plugins={plugin}"]
    found = check([], words, machine=LAPTOP)
    assert "A01" not in {p.id for p in found.problems}
    assert "A02" in {p.id for p in found.problems}
    assert "A01" in {p.id for p in check([], words[:1], machine=LAPTOP).problems}


def test_a_plugin_estimator_with_values_gets_a_critic(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("adv_estimators.register('mine', needs=('values',))(print)\n")
    words = ["algorithm.adv_estimator=mine", f"trainer.plugins={plugin}"]
    roles = check([], words, machine=LAPTOP).plan.where.roles
    assert "critic" in {role.name for role in roles}


def test_a_broken_plugin_is_reported_with_its_line(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("x = 1\ndef f(:\n")
    found = check([], [f"trainer.plugins={plugin}"], machine=LAPTOP)
    (problem,) = [p for p in found.problems if p.id == "S12"]
    assert "line 2" in problem.why
