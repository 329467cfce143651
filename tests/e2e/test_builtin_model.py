"""The built-in model's weights come out of its recipe again."""

import json
from pathlib import Path

import pytest
import torch

from luyen.base.process_setup import instruction_set_in_force, is_amd
from luyen.config.check import check
from luyen.train.start import run_training
from tests.e2e.recipes import RECIPES
from tests.e2e.tiny import luyen

SHIPPED = Path(__file__).parents[2] / "src/luyen/builtin/arithmetic"
transformers = pytest.importorskip("transformers")
HERE = {
    "instruction_set": "AMD" if is_amd() else instruction_set_in_force(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
}
HELD_OUT = "data.val_files=arithmetic://sum?digits=2&split=held-out"
PARITY = 0.05
"""How far the accuracy may be from the shipped model's on other machines."""


def accuracy(model: Path) -> float:
    """Share of right answers on pairs that were never trained on."""
    told = luyen("eval", model, HELD_OUT, "--json", "--show", "0")
    assert told.exit_code == 0, told.output
    return json.loads(told.output)["metrics"]["val/accuracy"]


@pytest.mark.slow
def test_the_recipe_makes_the_shipped_weights_again(tmp_path: Path):
    words = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=jsonl"]
    run_training(check([RECIPES["builtin_arithmetic"]], words))
    folder = tmp_path / "made"
    assert luyen("export", tmp_path / "luyen/builtin_arithmetic", folder).exit_code == 0
    made, shipped = (x / "model.safetensors" for x in (folder, SHIPPED))
    if json.loads((SHIPPED / "made_with.json").read_text()) == HERE:
        assert made.read_bytes() == shipped.read_bytes()
    else:
        assert abs(accuracy(folder) - accuracy(SHIPPED)) <= PARITY
