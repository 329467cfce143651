"""What other tools say about rows and weights of several files, and what it becomes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from luyen.config.check import check
from luyen.config.migrate.migrate import migrate
from luyen.config.migrate.reader import MigrationRequest
from luyen.config.migrate.report import Entry, Migration, yaml_text

SFT: dict[str, Any] = {
    **{"model_name_or_path": "builtin://arithmetic", "stage": "sft", "finetuning_type": "lora"},
    **{"dataset": "first, second", "output_dir": "saves"},
}
MODEL = "actor_rollout_ref.model"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def factory(**values: Any) -> Migration:
    """A file of LLaMA-Factory, on a machine with every package."""
    Path("sft.yaml").write_text(yaml.safe_dump({**SFT, **values}))
    return migrate(MigrationRequest(text="sft.yaml", installed=lambda _: True))


def entry(migration: Migration, name: str) -> Entry:
    [found] = [one for one in migration.entries if one.source == name and not one.is_default]
    return found


def test_most_rows_of_each_dataset_are_most_rows_of_each_file():
    assert factory(max_samples=7).keys["data.train_file_samples"] == [7, 7]
    assert factory(max_samples=7, dataset="first").keys["data.train_max_samples"] == 7


def test_interleaved_datasets_are_a_mixture():
    shares = factory(mix_strategy="interleave_under", interleave_probs="0.7, 0.3")
    assert shares.keys["data.train_weights"] == [0.7, 0.3]
    assert factory(mix_strategy="interleave_over").keys["data.train_weights"] == [1.0, 1.0]
    for one in (factory(mix_strategy="concat"), factory(interleave_probs="0.7,0.3")):
        assert "data.train_weights" not in one.keys


def test_the_mixture_passes_check():
    for name in ("first", "second"):
        row = '{"messages": [{"role": "user", "content": "1+1="}, '
        row += '{"role": "assistant", "content": "2"}]}\n'
        Path("data").mkdir(exist_ok=True)
        Path(f"data/{name}.json").write_text(f"[{row.strip()}]")
    migration = factory(max_samples=7, mix_strategy="interleave_under", interleave_probs="0.7,0.3")
    Path("luyen.yaml").write_text(yaml_text(migration))
    report = check([Path("luyen.yaml")], starts_a_run=False)
    assert [p for p in report.problems if p.severity == "error"] == []
    assert report.config.data.train_weights == (0.7, 0.3)
    assert report.config.data.train_file_samples == (7, 7)


def test_4_bit_weights_of_llama_factory_stay_below_its_adapter():
    found = factory(quantization_bit=4, quantization_method="bnb", double_quantization=False)
    assert found.keys[f"{MODEL}.quantization"] == "nf4"
    assert found.keys[f"{MODEL}.double_quantization"] is False
    for values in ({"quantization_bit": 8}, {"quantization_bit": 4, "quantization_method": "hqq"}):
        other = factory(**values)
        assert f"{MODEL}.quantization" not in other.keys
        assert entry(other, "quantization_bit").column == "unavailable"


def test_weights_that_are_purely_bfloat16_are_bfloat16():
    assert factory(pure_bf16=True).keys[f"{MODEL}.dtype"] == "bfloat16"
    assert f"{MODEL}.dtype" not in factory(pure_bf16=False).keys


def test_a_stream_of_rows_is_how_large_files_are_read():
    assert entry(factory(streaming=True), "streaming").column == "implied"


def test_axolotl_s_older_name_of_the_evaluation_is_known():
    values = {"base_model": "org/model", "datasets": [{"path": "org/rows", "type": "alpaca"}]}
    Path("a.yml").write_text(yaml.safe_dump({**values, "evaluation_strategy": "no"}))
    found = entry(migrate(MigrationRequest(text="a.yml")), "evaluation_strategy")
    assert "no such key" not in found.outcome.note


def test_keys_behind_a_variable_that_only_a_shell_knows_are_named():
    found = migrate(MigrationRequest(text="python -m verl.trainer.main_ppo trainer.nnodes=1 $MORE"))
    assert "write its keys into the command" in entry(found, "$MORE").outcome.note


def test_rows_of_axolotl_s_own_formats_are_to_be_written_as_messages():
    own = {"field_instruction": "context", "field_output": "target", "system_prompt": ""}
    values = {"base_model": "org/model", "datasets": [{"path": "rows.jsonl", "type": own}]}
    Path("config.yaml").write_text(yaml.safe_dump(values))
    found = {one.source: one for one in migrate(MigrationRequest(text="config.yaml")).entries}
    column = found["datasets[0].type.field_instruction"]
    assert column.column == "unavailable"
    assert "`messages`" in column.outcome.note
    assert found["datasets[0].type.system_prompt"].column == "implied"


def test_activations_that_axolotl_moves_to_the_host_are_computed_again():
    values = {"base_model": "org/model", "gradient_checkpointing": "offload"}
    Path("config.yaml").write_text(yaml.safe_dump(values))
    keys = migrate(MigrationRequest(text="config.yaml")).keys
    assert keys[f"{MODEL}.enable_gradient_checkpointing"] is True


def test_variables_before_a_command_are_no_keys_of_it():
    text = (
        "FORCE_TORCHRUN=1 llamafactory-cli train --model_name_or_path org/model --stage sft "
        "--lora_rank 4 --dataset first"
    )
    found = migrate(MigrationRequest(text=text))
    assert found.keys[f"{MODEL}.lora_rank"] == 4
    assert "FORCE_TORCHRUN" not in {one.source for one in found.entries}


@pytest.mark.parametrize(("written", "share"), [({}, 0.03), ({"warmup_steps": 0}, None)])
def test_axolotl_warms_up_by_its_default_only_where_no_steps_are_written(
    written: dict[str, Any], share: float | None
):
    Path("config.yaml").write_text(yaml.safe_dump({"base_model": "org/model", **written}))
    keys = migrate(MigrationRequest(text="config.yaml")).keys
    assert keys.get("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio") == share


@pytest.mark.parametrize(("weights", "column"), [([1.0], "implied"), ([1.0, 0.5], "unavailable")])
def test_the_weight_of_a_single_reward_is_no_loss(weights: list[float], column: str):
    values = {"base_model": "org/model", "rl": "grpo", "trl": {"reward_weights": weights}}
    Path("config.yaml").write_text(yaml.safe_dump(values))
    entries = migrate(MigrationRequest(text="config.yaml")).entries
    [found] = [one for one in entries if one.source == "trl.reward_weights"]
    assert found.column == column
