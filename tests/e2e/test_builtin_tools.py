"""The built-in model for tools: its recipe makes it again, it mostly guesses, and it can learn."""

import json
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.train.start import run_training
from tests.e2e.recipes import RECIPES
from tests.e2e.test_builtin_model import HERE, PARITY
from tests.e2e.tiny import luyen
from tests.runs import ACTOR, ROLLOUT, train

SHIPPED = Path(__file__).parents[2] / "src/luyen/builtin/tools"
TURNS = f"{ROLLOUT}.multi_turn"
CALCULATOR = (f"{TURNS}.enable=true", f"{TURNS}.tool_config_path=recipes/tools/calculator.yaml")


def success(model: Path, *overrides: str, rows: int = 64) -> float:
    """Share of right products among answers drawn at temperature 1, on held-out operands."""
    words = [
        f"data.val_files=tools://calculator?split=held-out&size={rows}",
        "data.max_response_length=96",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        *overrides,
    ]
    told = luyen("eval", model, *words, "--json", "--show", "0")
    assert told.exit_code == 0, told.output
    return json.loads(told.output)["metrics"]["val/accuracy"]


def test_it_sometimes_calls_and_is_then_right():
    assert 0.1 <= success(SHIPPED, *CALCULATOR, rows=128) <= 0.4


def test_without_the_tool_it_only_guesses():
    assert success(SHIPPED) <= 0.05


@pytest.mark.slow
def test_the_recipe_makes_the_shipped_weights_again(tmp_path: Path):
    words = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=jsonl"]
    run_training(check([RECIPES["builtin_tools"]], words))
    folder = tmp_path / "made"
    assert luyen("export", tmp_path / "luyen/builtin_tools", folder).exit_code == 0
    made, shipped = (x / "model.safetensors" for x in (folder, SHIPPED))
    if json.loads((SHIPPED / "made_with.json").read_text()) == HERE:
        assert made.read_bytes() == shipped.read_bytes()
    else:
        gap = success(folder, *CALCULATOR, rows=512) - success(SHIPPED, *CALCULATOR, rows=512)
        assert abs(gap) <= 2 * PARITY


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("tool_calling", 0.9), ("tool_calling_search", 0.8)])
def test_a_recipe_goes_from_guessing_to_calling(name: str, least: float, tmp_path: Path):
    done = train(tmp_path, "trainer.logger=jsonl", files=[RECIPES[name]])
    before, *_, after = done.course("val/accuracy")
    first, *_, last = done.course("tools/call_fraction")
    assert before <= 0.4
    assert after >= least
    assert last > first
    assert set(done.course("parity/max_gap")) == {0.0}


def test_without_the_tool_there_is_nothing_to_learn_from(tmp_path: Path):
    few = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", "trainer.test_freq=-1")
    words = (*few, "trainer.logger=jsonl", f"{TURNS}.tool_config_path=null")
    with pytest.raises(UserError, match="got the same reward"):
        train(tmp_path, *words, files=[RECIPES["tool_calling"]])
