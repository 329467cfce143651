"""Runs with 8-bit AdamW and Muon: killed and resumed they have the chain of one that was not."""

import shutil
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.checkpoint.tensors import load_state
from tests.runs import ACTOR, MODEL, train

NAMES = ("adamw_8bit", "muon")
LARGER = (
    f"{MODEL}.override_config={{num_hidden_layers: 1, hidden_size: 128, intermediate_size: 128, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 64, initializer_range: 0.2}"
)
"""Matrices of at least 4096 numbers, whose moments have 8 bits."""


def chain(root: Path) -> list[str]:
    return [line.chain for line in read_digests(root / "digests.jsonl")]


@pytest.mark.parametrize("more", [(), (f"{MODEL}.lora_rank=32",)], ids=["whole", "adapter"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_to_the_same_bits(name: str, more: tuple[str, ...], tmp_path: Path):
    words = (f"{ACTOR}.optim.name={name}", "trainer.total_training_steps=4", *more)
    words += ("trainer.save_freq=2", LARGER)
    whole = train(tmp_path, *words)
    before = chain(whole.root)
    shutil.rmtree(whole.root / "checkpoints" / "step_000004")
    train(tmp_path, *words)
    assert chain(whole.root) == before
    assert len(before) == 4
    saved = load_state(whole.root / "checkpoints" / "step_000004", "actor_optimizer")
    assert saved[name]["state"], "no weight is large enough for it"
    assert all(gap == 0 for gap in whole.course("parity/max_gap"))


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path: Path):
    train(tmp_path, "trainer.save_freq=1")
    with pytest.raises((UserError, AssertionError), match=r"optim\.name"):
        train(tmp_path, f"{ACTOR}.optim.name=muon", "trainer.total_training_steps=3")
