"""Adapters whose weights look like those of LoRA and are added in another way."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.config.model_folder.check import read_adapter_config
from luyen.config.model_folder.files import InvalidFile
from tests.unit.config.test_migrate import GRPO, entry, from_yaml

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "use_rslora": False,
    "alpha_pattern": {},
    "layer_replication": None,
}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    return folder


def test_plain_lora_is_read(tmp_path: Path):
    assert read_adapter_config(written(tmp_path)) == PLAIN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_qalora", True),
        ("alpha_pattern", {"q_proj": 99}),
        ("rank_pattern", {"q_proj": 8}),
        ("layer_replication", [[0, 2], [0, 2]]),
        ("peft_type", "IA3"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, name: str, value: Any):
    with pytest.raises(InvalidFile, match="which is not computed here") as refused:
        read_adapter_config(written(tmp_path, **{name: value}))
    assert name in str(refused.value)


# Kinds in the configurations of other tools.


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_kinds_of_adapters_are_carried_over():
    given = {"model_name_or_path": "org/m", "dataset_name": "o/d", "use_peft": True}
    kinds = {"use_rslora": True, "use_dora": True, "lora_dropout": 0.1}
    found = from_yaml({**given, **kinds, "init_lora_weights": "gaussian"}, name="sft.yaml")
    model = "actor_rollout_ref.model"
    assert {name: found.keys[f"{model}.{name}"] for name in kinds} == kinds
    assert found.keys[f"{model}.lora_init"] == "gaussian"
    assert from_yaml(given, name="sft.yaml").keys[f"{model}.lora_dropout"] == 0.05  # TRL's default
    found = from_yaml({**given, **kinds, "init_lora_weights": "pissa"}, name="dpo.yaml")
    assert f"{model}.lora_dropout" not in found.keys
    assert found.keys[f"{model}.use_dora"] is True
    assert "switches dropout off" in entry(found, "lora_dropout").outcome.note
    given_dpo = {**given, **kinds, "disable_dropout": False}
    found_on = from_yaml(given_dpo, name="dpo.yaml")
    assert found_on.keys[f"{model}.lora_dropout"] == 0.1
    sampled = from_yaml({**GRPO, "use_peft": True, "lora_dropout": 0.1})
    assert "where answers are sampled" in entry(sampled, "lora_dropout").outcome.note
    assert "stay those of the model's files" in entry(found, "init_lora_weights").outcome.note
    found = from_yaml({**GRPO, "use_peft": True, "use_dora": True})
    assert "on one device" in entry(found, "use_dora").outcome.note
    factory = {"model_name_or_path": "org/m", "stage": "sft", "dataset": "d", "lora_rank": 8}
    found = from_yaml({**factory, **kinds}, name="factory.yaml")
    assert {name: found.keys[f"{model}.{name}"] for name in kinds} == kinds
    axolotl = {"base_model": "o/m", "datasets": [{"path": "o/d"}], "adapter": "lora", "lora_r": 8}
    named = {"peft_use_rslora": True, "peft_use_dora": True, "lora_dropout": 0.1}
    found = from_yaml({**axolotl, **named}, name="axolotl.yaml")
    assert {name: found.keys[f"{model}.{name}"] for name in kinds} == kinds


def test_scales_of_4_bit_weights_are_those_of_trl():
    given = {"model_name_or_path": "org/m", "dataset_name": "o/d", "use_peft": True}
    given |= {"load_in_4bit": True}
    name = "actor_rollout_ref.model.double_quantization"
    for written, double in (({}, False), ({"use_bnb_nested_quant": True}, True)):
        found = from_yaml({**given, **written}, name="sft.yaml", installed=lambda _: True)
        assert found.keys["actor_rollout_ref.model.quantization"] == "nf4"
        assert found.keys[name] is double
    fp4 = {**given, "bnb_4bit_quant_type": "fp4"}
    found = from_yaml(fp4, name="sft.yaml", installed=lambda _: True)
    assert entry(found, "bnb_4bit_quant_type").outcome.note == "only nf4 is here"
    given.pop("load_in_4bit")
    assert name not in from_yaml(given, name="sft.yaml").keys
