"""Single keys of other tools: what they become, and that nothing is executed or lost."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.migrate.migrate import migrate
from luyen.config.migrate.reader import MigrationRequest
from luyen.config.migrate.report import Entry, Migration, yaml_text
from luyen.engine.optim import learning_rate
from tests.e2e.tiny import luyen

ACTOR = "actor_rollout_ref.actor"
GRPO = {"model_name_or_path": "org/model", "dataset_name": "org/rows", "num_generations": 4}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def from_yaml(values: dict[str, Any], *, name: str = "config.yaml", **more: Any) -> Migration:
    Path(name).write_text(yaml.safe_dump(values))
    return migrate(MigrationRequest(text=name, **more))


def from_words(*words: str, **more: Any) -> Migration:
    return migrate(
        MigrationRequest(text=f"python -m verl.trainer.main_ppo {' '.join(words)}", **more)
    )


def entry(migration: Migration, name: str) -> Entry:
    [found] = [one for one in migration.entries if one.source == name and not one.is_default]
    return found


def trl(**values: Any) -> dict[str, Any]:
    return from_yaml({**GRPO, **values}).keys


# Batches of answers.


@pytest.mark.parametrize(
    ("each", "accumulated", "devices", "per_generation", "prompts", "mini", "updates"),
    [
        (4, 2, 1, None, 2, 2, 1),
        (8, 4, 4, None, 32, 32, 1),
        (4, 2, 2, 8, 16, 4, 4),
        (4, 8, 1, 2, 8, 8, 1),
    ],
)
def test_answers_of_a_device_become_prompts_of_a_step(
    each: int,
    accumulated: int,
    devices: int,
    per_generation: int | None,
    prompts: int,
    mini: int,
    updates: int,
):
    values: dict[str, Any] = {
        "per_device_train_batch_size": each,
        "gradient_accumulation_steps": accumulated,
        "max_steps": 100,
    }
    values |= {} if per_generation is None else {"steps_per_generation": per_generation}
    keys = from_yaml({**GRPO, **values}, devices=devices).keys
    assert keys["data.train_batch_size"] == prompts
    assert keys[f"{ACTOR}.ppo_mini_batch_size"] == mini
    assert keys["trainer.total_training_steps"] == 100 // updates
    # Answers of an optimizer step and of a generation, counted as TRL counts them.
    assert mini * 4 == each * accumulated * devices
    assert prompts * 4 == each * devices * max(per_generation or accumulated, accumulated)


def test_passes_over_a_generation_are_counted_into_its_steps():
    values = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    keys = trl(**values, num_iterations=2, max_steps=50, warmup_steps=10, save_steps=20)
    assert keys[f"{ACTOR}.ppo_epochs"] == 2
    assert keys["trainer.total_training_steps"] == 25
    assert keys[f"{ACTOR}.optim.lr_warmup_steps"] == 5
    assert keys["trainer.save_freq"] == 10
    assert keys[f"{ACTOR}.clip_ratio_c"] == 1e9  # TRL has no dual clip


def test_answers_that_make_no_whole_group_are_named():
    found = from_yaml({**GRPO, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1})
    assert found.keys["data.train_batch_size"] == 1
    assert "no whole number of prompts" in entry(found, "per_device_train_batch_size").outcome.note


# Advantages and losses.


def test_the_epsilon_of_trls_std_is_written():
    assert trl()["algorithm.std_epsilon"] == 1e-4
    assert "algorithm.std_epsilon" not in trl(scale_rewards=False)
    assert trl(scale_rewards=False)["algorithm.norm_adv_by_std_in_grpo"] is False
    found = from_yaml({**GRPO, "scale_rewards": "batch"})
    assert entry(found, "scale_rewards").column == "unavailable"


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ],
)
def test_loss_types_of_trl_are_aggregations(loss: str, aggregation: str):
    assert trl(loss_type=loss)[f"{ACTOR}.loss_agg_mode"] == aggregation


def test_other_losses_of_trl_are_losses():
    keys = trl(loss_type="cispo", epsilon_high=5.0)
    assert keys[f"{ACTOR}.policy_loss.loss_mode"] == "cispo"
    assert keys[f"{ACTOR}.policy_loss.cispo_cap"] == 5.0
    keys = trl(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4)
    assert keys[f"{ACTOR}.policy_loss.loss_mode"] == "gspo"
    assert f"{ACTOR}.loss_agg_mode" not in keys
    found = from_yaml({**GRPO, "loss_type": "luspo"})
    assert entry(found, "loss_type").column == "unavailable"


def test_a_clip_with_two_sides():
    keys = trl(epsilon=0.1, epsilon_high=0.3)
    assert (keys[f"{ACTOR}.clip_ratio_low"], keys[f"{ACTOR}.clip_ratio_high"]) == (0.1, 0.3)
    assert trl(epsilon=0.1)[f"{ACTOR}.clip_ratio"] == 0.1


def test_beta_is_the_kl_of_the_loss_in_grpo_and_of_the_reward_in_rloo():
    keys = trl(beta=0.04)
    assert (keys[f"{ACTOR}.use_kl_loss"], keys[f"{ACTOR}.kl_loss_coef"]) == (True, 0.04)
    assert trl(beta=0.0)[f"{ACTOR}.use_kl_loss"] is False
    keys = from_yaml({**GRPO, "beta": 0.05}, name="rloo.yaml").keys
    assert keys["algorithm.adv_estimator"] == "rloo"
    assert keys["algorithm.kl_ctrl.kl_coef"] == 0.05
    assert f"{ACTOR}.use_kl_loss" not in keys


# Preferences.


def dpo(**values: Any) -> dict[str, Any]:
    return from_yaml(
        {"model_name_or_path": "org/m", "dataset_name": "org/d", **values}, name="dpo.yaml"
    ).keys


def test_losses_of_preferences_and_their_numbers():
    keys = dpo(loss_type="ipo", beta=0.3, label_smoothing=0.1)
    assert keys["preference.loss_type"] == ["ipo"]
    assert keys["preference.beta"] == 0.3
    assert "preference.label_smoothing" not in keys  # ipo does not read it
    keys = dpo(loss_type=["sigmoid", "bco_pair"], loss_weights=[0.8, 0.2])
    assert keys["preference.loss_weights"] == [0.8, 0.2]
    keys = dpo(rpo_alpha=0.5)
    assert keys["preference.loss_type"] == ["sigmoid", "sft"]
    assert keys["preference.loss_weights"] == [1.0, 0.5]
    assert dpo(precompute_ref_log_probs=True)["preference.reference"] == "precomputed"


def test_losses_of_llama_factory():
    values = {"model_name_or_path": "org/m", "stage": "dpo", "dataset": "pairs"}
    keys = from_yaml({**values, "pref_loss": "simpo", "simpo_gamma": 1.0, "pref_beta": 2.0}).keys
    assert keys["preference.loss_type"] == ["simpo"]
    assert (keys["preference.simpo_gamma"], keys["preference.beta"]) == (1.0, 2.0)
    keys = from_yaml({**values, "pref_loss": "sigmoid", "pref_ftx": 0.1}).keys
    assert keys["preference.loss_weights"] == [1.0, 0.1]


# Rates, adapters, lengths.


def peer_rate(kind: str, step: int, total: int, warm: int, floor: float) -> float:
    """The share of the peak that the Trainer's schedules give an update, counted from 1."""
    if step <= warm:
        return step / warm
    done = (step - warm) / (total - warm)
    curve = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "cosine_with_min_lr": floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)),
        "constant_with_warmup": 1.0,
    }
    return curve[kind]


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_min_lr", "constant_with_warmup"])
def test_schedules_give_the_rates_of_the_trainer(kind: str):
    values = {
        "learning_rate": 2e-5,
        "lr_scheduler_type": kind,
        "warmup_ratio": 0.1,
        "max_steps": 200,
    }
    floor = {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}} if kind == "cosine_with_min_lr" else {}
    migration = from_yaml(
        {"model_name_or_path": "org/m", "dataset_name": "o/d", **values, **floor}, name="sft.yaml"
    )
    Path("new.yaml").write_text(yaml_text(migration))
    optim = check([Path("new.yaml")], starts_a_run=False).config.actor_rollout_ref.actor.optim
    for step in range(200):
        rate = learning_rate(optim, step=step, total_steps=200)
        wanted = 2e-5 * peer_rate(kind, step + 1, 200, 20, 0.1)
        assert rate == pytest.approx(wanted, abs=2e-5 * 0.012)  # one step of the line at most


def test_schedules_that_are_not_there_are_named():
    found = from_yaml({**GRPO, "lr_scheduler_type": "inverse_sqrt"})
    assert "no schedule inverse_sqrt" in entry(found, "lr_scheduler_type").outcome.note


def test_the_scale_of_an_adapter():
    adapter = {"use_peft": True, "lora_r": 16, "lora_alpha": 8}
    keys = dpo(**adapter)
    assert (
        keys["actor_rollout_ref.model.lora_alpha"] / keys["actor_rollout_ref.model.lora_rank"]
        == 0.5
    )
    keys = dpo(**adapter, use_rslora=True)
    assert keys["actor_rollout_ref.model.lora_alpha"] == 8
    assert keys["actor_rollout_ref.model.use_rslora"] is True
    keys = dpo(lora_r=16, lora_alpha=8)
    assert "actor_rollout_ref.model.lora_rank" not in keys  # use_peft is off
    assert dpo(use_peft=True)["actor_rollout_ref.model.target_modules"] == ["q_proj", "v_proj"]


def test_lengths_of_rows():
    keys = dpo(max_length=1000, max_prompt_length=300)
    assert (keys["data.max_prompt_length"], keys["data.max_response_length"]) == (300, 700)
    keys = dpo(max_length=40000)
    assert keys["data.max_prompt_length"] + keys["data.max_response_length"] == 40000
    assert keys[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 40000
    found = from_yaml(
        {"model_name_or_path": "o/m", "dataset_name": "o/d", "max_length": None}, name="sft.yaml"
    )
    assert "rows need a limit" in entry(found, "max_length").outcome.note


def test_epochs_that_are_no_whole_number_are_named():
    found = from_yaml({**GRPO, "num_train_epochs": 0.5})
    assert "trainer.total_training_steps" in entry(found, "num_train_epochs").outcome.note
    assert entry(from_yaml({**GRPO, "num_train_epochs": 2.0}), "num_train_epochs").outcome.keys == {
        "trainer.total_epochs": 2
    }


def test_packs_are_not_rows():
    found = from_yaml({"base_model": "o/m", "sample_packing": True, "sequence_len": 4096})
    assert entry(found, "sample_packing").column == "unavailable"
    assert "4096 tokens" in entry(found, "sample_packing").outcome.note


# Engines, loggers, rows and rewards.


def test_an_engine_and_a_logger_that_are_installed_stay():
    words = ("actor_rollout_ref.rollout.name=vllm", "trainer.logger=[console,wandb]")
    keys = from_words(*words, installed=lambda _: True).keys
    assert keys["actor_rollout_ref.rollout.name"] == "vllm"
    assert keys["trainer.logger"] == ["console", "wandb"]
    found = from_words(*words, installed=lambda _: False)
    assert found.keys["actor_rollout_ref.rollout.name"] == "native"
    assert "where it is" in entry(found, "trainer.logger").outcome.note
    more = (*words, "actor_rollout_ref.rollout.top_p=0.9")
    found = from_words(*more, installed=lambda _: True)
    assert found.keys["actor_rollout_ref.rollout.name"] == "native"
    assert "top_p" in entry(found, "actor_rollout_ref.rollout.name").outcome.note


def test_8_bit_adamw_and_muon_stay_where_they_can_run():
    given = {"base_model": "o/m", "optimizer": "adamw_bnb_8bit"}
    name = "actor_rollout_ref.actor.optim.name"
    assert from_yaml(given, installed=lambda _: True).keys[name] == "adamw_8bit"
    found = from_yaml(given, installed=lambda _: False)
    assert name not in found.keys
    assert "bitsandbytes is not installed" in entry(found, "optimizer").outcome.note
    assert from_yaml({**given, "optimizer": "muon"}).keys[name] == "muon"


def test_4_bit_weights_stay_below_an_adapter_of_an_offline_stage():
    given = {"base_model": "o/m", "load_in_4bit": True, "adapter": "qlora", "lora_r": 8}
    name = "actor_rollout_ref.model.quantization"
    assert from_yaml(given, installed=lambda _: True).keys[name] == "nf4"
    found = from_yaml(given, installed=lambda _: False)
    assert name not in found.keys
    assert "bitsandbytes is not installed" in entry(found, "load_in_4bit").outcome.note
    whole = {"base_model": "o/m", "load_in_4bit": True}
    assert name not in from_yaml(whole, installed=lambda _: True).keys


def test_names_of_dataset_info_are_files_and_hub_datasets(tmp_path: Path):
    (tmp_path / "data").mkdir()
    info = {
        "sums": {"file_name": "sums.json"},
        "orca": {
            "hf_hub_url": "Open/Orca",
            "subset": "en",
            "split": "test",
            "columns": {"prompt": "q"},
        },
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    values = {"model_name_or_path": "o/m", "stage": "sft", "dataset": "sums,orca,gone"}
    found = from_yaml(values)
    assert found.keys["data.train_files"] == [
        *("data/sums.json", "hf://Open/Orca?split=test&config=en", "data/gone.json")
    ]
    note = entry(found, "dataset").outcome.note
    assert "dataset_info.json has no gone" in note
    assert "columns of hub datasets" in note


def test_relative_paths_start_from_the_new_file(tmp_path: Path):
    (tmp_path / "new").mkdir()
    values = {"base_model": "./model", "datasets": [{"path": "rows.jsonl", "type": "alpaca"}]}
    keys = from_yaml(values, output=tmp_path / "new" / "run.yaml").keys
    assert keys["data.train_files"] == ["../rows.jsonl"]
    assert keys["actor_rollout_ref.model.path"] == "../model"
    assert from_yaml(values).keys["data.train_files"] == ["rows.jsonl"]


def test_a_reward_of_a_file_that_only_defines_is_named_there():
    text = "from trl import GRPOConfig, GRPOTrainer\ndef short(completions, **_): return [0.0]\n"
    call = "GRPOTrainer(model='o/m', reward_funcs=[short], args=GRPOConfig(num_generations=4))"
    Path("guarded.py").write_text(f"{text}if __name__ == '__main__':\n    {call}.train()\n")
    keys = migrate(MigrationRequest(text="guarded.py")).keys
    assert keys["reward.custom_reward_function.name"] == "short"
    assert Path(keys["reward.custom_reward_function.path"]).name == "guarded.py"
    Path("bare.py").write_text(f"{text}{call}.train()\n")
    found = migrate(MigrationRequest(text="bare.py"))
    assert "reward.custom_reward_function.path" not in found.keys
    assert entry(found, "reward_funcs").column == "unavailable"


def test_texts_of_several_lines_and_empty_blocks_are_kept():
    prompt = "First.\n\tThen: #2, 'so' \"too\"."
    found = from_yaml({**GRPO, "system_prompt": prompt, "generation_kwargs": {}, "a": {"b": {}}})
    assert yaml.safe_load(yaml_text(found))["data"]["system_prompt"] == prompt
    names = {one.source for one in found.entries}
    assert {"generation_kwargs", "a.b"} <= names


def test_types_of_weights():
    assert trl(bf16=True)["actor_rollout_ref.model.dtype"] == "bfloat16"
    assert trl(bf16=False)["actor_rollout_ref.model.dtype"] == "float32"
    assert "actor_rollout_ref.model.dtype" not in trl(bf16=False, fp16=True)
    assert trl(torch_dtype="float32", bf16=True)["actor_rollout_ref.model.dtype"] == "float32"


# Python files.


def test_a_python_file_is_read_and_not_run():
    text = """
import os
open("ran", "w").write("x")
BATCH, NAME = 4, "org/model"
batch = 2 * 3
args = DPOConfig(
    output_dir=f"out-{batch}", per_device_train_batch_size=batch, learning_rate=os.environ["LR"],
    beta=-1 * -0.25, **more,
)
args.max_length = 512
setattr(args, "seed", 7)
peft = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.1)
model = AutoModelForCausalLM.from_pretrained("org/base", torch_dtype=torch.bfloat16)
data = load_dataset("org/rows", "main", split="train")
DPOTrainer(model=model, args=args, train_dataset=data, peft_config=peft)
"""
    Path("train.py").write_text(text)
    found = migrate(MigrationRequest(text="train.py"))
    assert not Path("ran").exists()
    keys = found.keys
    assert keys["trainer.default_local_dir"] == "out-6"
    assert keys["data.train_batch_size"] == 6
    assert keys["preference.beta"] == 0.25
    assert keys["trainer.seed"] == 7
    assert keys["data.train_files"] == ["hf://org/rows?split=train&config=main"]
    assert keys["actor_rollout_ref.model.path"] == "org/base"
    assert keys["actor_rollout_ref.model.lora_rank"] == 4
    assert "the script computes it" in entry(found, "learning_rate").outcome.note
    assert entry(found, "**more").column == "unavailable"
    assert entry(found, "lora_dropout").column == "implied"


# Commands and files of no tool.


def test_a_key_that_is_open_is_named_and_left_out():
    found = from_words("trainer.nnodes=$NODES", "data.train_files=$HOME/rows.parquet")
    assert "trainer.nnodes" not in found.keys
    assert "$NODES" in entry(found, "trainer.nnodes").outcome.note
    assert found.keys["data.train_files"] == "~/rows.parquet"


def test_what_check_refuses_is_taken_out_with_its_reason():
    found = from_words(
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        f"{ACTOR}.kl_loss_coef=0.5",
        f"{ACTOR}.policy_loss.loss_mode=imaginary",
    )
    assert entry(found, f"{ACTOR}.kl_loss_coef").column == "implied"
    lost = entry(found, f"{ACTOR}.policy_loss.loss_mode")
    assert lost.column == "unavailable"
    assert "no such policy loss" in lost.outcome.note


def test_commands_of_the_flat_tools():
    words = "trl dpo --model_name_or_path o/m --dataset_name o/d --beta 0.3 --bf16 --lora_r=4"
    found = migrate(MigrationRequest(text=words))
    assert found.keys["preference.beta"] == 0.3
    assert found.keys["actor_rollout_ref.model.dtype"] == "bfloat16"
    Path("sft.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": "o/m", "stage": "sft", "dataset": "d"})
    )
    found = migrate(MigrationRequest(text="llamafactory-cli train sft.yaml learning_rate=1e-5"))
    assert found.tool == "LLaMA-Factory"
    assert found.keys[f"{ACTOR}.optim.lr"] == 1e-5


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "some: thing", "neither verl"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.py", "print(1)", "no configuration of TRL"),
        ("a.py", "def (", "no Python"),
        ("a.py", "SFTConfig()\nDPOConfig()", "it configures sft and dpo"),
        ("a.sh", "echo hello", "no training command"),
        ("b.yaml", "model_name_or_path: a\nstage: export\n", "no stage of LLaMA-Factory"),
    ],
)
def test_a_file_of_no_tool_is_refused(name: str, text: str, why: str):
    Path(name).write_text(text)
    with pytest.raises(UserError, match=why):
        migrate(MigrationRequest(text=name))


def test_a_path_that_is_not_there_and_a_folder_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        migrate(MigrationRequest(text="nowhere.yaml"))
    with pytest.raises(UserError, match="it is a folder"):
        migrate(MigrationRequest(text=str(tmp_path)))


def test_values_of_another_kind_are_named():
    found = from_yaml({**GRPO, "max_steps": "many", "warmup_ratio": [1]})
    assert entry(found, "warmup_ratio").column == "unavailable"
    assert "by hand" in entry(found, "max_steps").outcome.note
    with pytest.raises(UserError, match="micro_batch_size = 'auto'"):
        from_yaml({"base_model": "o/m", "micro_batch_size": "auto"})
    sizes = (f"{ACTOR}.ppo_micro_batch_size=16", "trainer.nnodes=$N")
    found = from_words(*sizes, "trainer.n_gpus_per_node=8")
    assert "devices is not known" in entry(found, f"{ACTOR}.ppo_micro_batch_size").outcome.note
    found = from_words(sizes[0], "trainer.n_gpus_per_node=8")
    assert found.keys[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 2


# The command.


def test_the_command_writes_once_and_prints_json(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**GRPO, "seed": 3}))
    done = luyen("migrate", "config.yaml", "--output", "new.yaml", "--devices", "2")
    assert done.exit_code == 0, done.output
    assert "Carried over" in done.stdout
    assert yaml.safe_load(Path("new.yaml").read_text())["trainer"]["n_gpus_per_node"] == 2
    again = luyen("migrate", "config.yaml", "--output", "new.yaml")
    assert isinstance(again.exception, UserError)
    page = json.loads(luyen("migrate", "config.yaml", "--json").stdout)
    assert {one["column"] for one in page["entries"]} <= {
        *("carried", "renamed", "implied", "unavailable", "default")
    }
    assert yaml.safe_load(page["yaml"])["trainer"]["seed"] == 3
    plain = luyen("migrate", "config.yaml")
    assert yaml.safe_load(plain.stdout)["trainer"]["seed"] == 3
    assert "Renamed" in plain.stderr
