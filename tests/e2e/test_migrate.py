"""Configurations of four tools, migrated and run for a step or two on the built-in model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from luyen.telemetry.metrics import read_metrics
from tests.e2e.tiny import luyen

MODEL = "builtin://arithmetic"
VERL = """
gen_bsz=4
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="arithmetic://sum?size=64" \\
    data.val_files="arithmetic://sum?size=8&split=held-out" \\
    data.train_batch_size=$((gen_bsz * 2)) \\
    data.max_prompt_length=32 \\
    data.max_response_length=8 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=builtin://arithmetic \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${gen_bsz} \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    trainer.logger=['console','wandb'] \\
    trainer.n_gpus_per_node=1 \\
    trainer.total_training_steps=1 $@
"""
TRL = """
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

MODEL = "builtin://arithmetic"
dataset = load_dataset("json", data_files="pairs.jsonl", split="train")
training_args = DPOConfig(
    output_dir="dpo",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=5e-6,
    lr_scheduler_type="linear",
    warmup_ratio=0.5,
    max_steps=2,
    max_length=64,
    beta=0.2,
    report_to="none",
)
trainer = DPOTrainer(model=MODEL, args=training_args, train_dataset=dataset)
trainer.train()
"""


def say(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def migrated(source: Path | str, folder: Path) -> Path:
    """The new file; the command says that nothing is left to do."""
    output = folder / "luyen.yaml"
    done = luyen("migrate", source, "--output", output)
    assert done.exit_code == 0, done.output
    assert "`luyen check` finds no error in it" in done.stdout
    return output


def steps(config: Path, folder: Path) -> list[int]:
    """Steps that a run of the file took."""
    runs = folder / "runs"
    words = (f"trainer.default_local_dir={runs}", "trainer.experiment_name=once")
    done = luyen(
        "train", config, *words, "trainer.project_name=p", "trainer.val_before_train=false"
    )
    assert done.exit_code == 0, done.output
    return [line.step for line in read_metrics(runs / "p" / "once" / "metrics.jsonl") if line.step]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_verl_command_of_25_overrides_runs(tmp_path: Path):
    assert VERL.count("=") - VERL.count("?") - VERL.count("&") >= 25
    (tmp_path / "run.sh").write_text(VERL)
    config = migrated(tmp_path / "run.sh", tmp_path)
    values = yaml.safe_load(config.read_text())
    assert values["data"]["train_batch_size"] == 8
    assert values["actor_rollout_ref"]["rollout"]["name"] == "native"
    assert steps(config, tmp_path) == [1]


def test_a_trl_dpo_script_runs(tmp_path: Path):
    rows = [
        {
            "prompt": say("user", f"{i}+1="),
            "chosen": say("assistant", str(i + 1)),
            "rejected": say("assistant", str(i + 2)),
        }
        for i in range(12)
    ]
    write_rows(tmp_path / "pairs.jsonl", rows)
    (tmp_path / "train_dpo.py").write_text(TRL)
    config = migrated(tmp_path / "train_dpo.py", tmp_path)
    values = yaml.safe_load(config.read_text())
    assert values["data"]["train_files"] == ["pairs.jsonl"]
    assert values["preference"] == {"loss_type": ["sigmoid"], "beta": 0.2}
    assert steps(config, tmp_path) == [1, 2]


def test_a_llama_factory_sft_file_runs(tmp_path: Path):
    (tmp_path / "data").mkdir()
    rows = [{"instruction": f"{i}+2=", "input": "", "output": str(i + 2)} for i in range(12)]
    (tmp_path / "data" / "sums.json").write_text(json.dumps(rows))
    info = {"sums": {"file_name": "sums.json"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    values = {
        **{"model_name_or_path": MODEL, "stage": "sft", "do_train": True},
        **{"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"},
        **{"dataset": "sums", "template": "qwen", "cutoff_len": 64, "max_samples": 8},
        **{"output_dir": "saves", "per_device_train_batch_size": 1},
        **{"gradient_accumulation_steps": 4, "learning_rate": 1e-4, "num_train_epochs": 1.0},
        **{"lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    config = migrated(tmp_path / "sft.yaml", tmp_path)
    model = yaml.safe_load(config.read_text())["actor_rollout_ref"]["model"]
    assert (model["lora_rank"], model["lora_alpha"]) == (4, 8.0)
    assert steps(config, tmp_path) == [1, 2]


def test_an_axolotl_grpo_file_runs(tmp_path: Path):
    rows = [{"prompt": say("user", f"{i}+3="), "answer": str(i + 3)} for i in range(16)]
    write_rows(tmp_path / "sums.jsonl", rows)
    reward = "def exact(completions, answer, **_):\n"
    reward += "    said = [c if isinstance(c, str) else c[-1]['content'] for c in completions]\n"
    reward += "    return [float(s.strip() == a) for s, a in zip(said, answer, strict=True)]\n"
    (tmp_path / "rewards.py").write_text(reward)
    values = {
        **{"base_model": MODEL, "rl": "grpo", "sequence_len": 48, "learning_rate": 1e-6},
        "trl": {
            **{"beta": 0.0, "max_completion_length": 8, "num_generations": 4, "use_vllm": True},
            "reward_funcs": ["rewards.exact"],
        },
        "datasets": [{"path": "sums.jsonl", "ds_type": "json", "type": "chat_template"}],
        **{"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1},
        **{"optimizer": "adamw_torch_fused", "output_dir": "./out", "val_set_size": 0.0},
    }
    (tmp_path / "grpo.yml").write_text(yaml.safe_dump(values))
    config = migrated(tmp_path / "grpo.yml", tmp_path)
    data = yaml.safe_load(config.read_text())["data"]
    assert (data["train_batch_size"], data["max_prompt_length"]) == (2, 40)
    assert steps(config, tmp_path) == [1]
