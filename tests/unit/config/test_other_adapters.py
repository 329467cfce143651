"""Adapters whose weights look like those of LoRA and are added in another way."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.config.model_folder.check import read_adapter_config
from luyen.config.model_folder.files import InvalidFile

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
        ("use_rslora", True),
        ("use_dora", True),
        ("alpha_pattern", {"q_proj": 99}),
        ("rank_pattern", {"q_proj": 8}),
        ("layer_replication", [[0, 2], [0, 2]]),
        ("peft_type", "IA3"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, name: str, value: Any):
    with pytest.raises(InvalidFile, match="only plain LoRA") as refused:
        read_adapter_config(written(tmp_path, **{name: value}))
    assert name in str(refused.value)
