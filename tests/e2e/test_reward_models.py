"""Reward models are trained from generated rows, exported, and read back by transformers."""

from pathlib import Path

import pytest
import torch

from luyen.data.tokenizer import load_tokenizer
from luyen.models.reward_model import read_facts
from tests.e2e.reward_models import taught
from tests.tiny_models import read_judge_net

OBJECTIVE = "reward_training.objective"


def test_a_preference_is_learned_and_transformers_sees_it(tmp_path: Path):
    """Answers that are even are better; of rows that were held out, too."""
    path, found = taught(tmp_path, "arithmetic://sum?pairs=even", steps=50)
    assert found["reward_model/val_accuracy"] >= 0.9
    assert found["reward_model/val_calibration_error"] < 0.3
    assert found["reward_model/val_chosen_score"] > found["reward_model/val_rejected_score"]
    net, tokenizer = read_judge_net(Path(path)), load_tokenizer(path)
    said = "<|im_start|>user\n{}=<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    pairs = [("31+20", 44, 45), ("17+50", 88, 91), ("28+41", 36, 33), ("62+11", 90, 77)]
    for asked, *answers in pairs:
        inputs = [torch.tensor([tokenizer.encode(said.format(asked, a))]) for a in answers]
        with torch.no_grad():
            better, worse = (float(net(one).logits[0, 0]) for one in inputs)
        assert better > worse


@pytest.mark.parametrize(
    ("objective", "rows", "words", "names"),
    [
        ("regression", "labels=even", (), {"loss", "absolute_error", "bias"}),
        ("process", "steps=1&noise=0.5", (), {"loss", "accuracy", "step_score"}),
        (
            "bradley_terry",
            "pairs=even",
            ("reward_training.center_rewards_coefficient=0.1",),
            {"loss", "accuracy", "margin", "chosen_score", "rejected_score"},
        ),
    ],
)
def test_every_objective_runs_as_a_stage(
    tmp_path: Path, objective: str, rows: str, words: tuple[str, ...], names: set[str]
):
    rows = f"arithmetic://sum?{rows}"
    path, found = taught(tmp_path, rows, f"{OBJECTIVE}={objective}", *words, steps=2)
    for name in names:
        assert f"reward_model/{name}" in found
        assert f"reward_model/val_{name}" in found
    is_judged = objective != "regression"
    assert ("reward_model/val_calibration_error" in found) == is_judged
    assert read_facts(path, field="x").is_stepwise == (objective == "process")
