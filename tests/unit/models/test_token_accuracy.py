"""Token accuracy: by hand, in the step of an update, and on validation rows."""

from pathlib import Path

import pytest
import torch

from luyen.config.check import check
from luyen.models.policy import Policy
from luyen.telemetry.metrics import read_metrics
from luyen.train.start import run_training
from tests.runs import MODEL, TINY
from tests.tiny_models import tiny_net

TOKENS, MASK = torch.arange(3, 20), torch.arange(17) > 0


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_token_counts_where_no_other_is_likelier(is_fused: bool):
    from dataclasses import replace

    policy = Policy(tiny_net(), vocabulary=61).eval()
    policy.head = replace(policy.head, is_fused=is_fused)
    plain = tiny_net()
    best = plain(input_ids=TOKENS[None]).logits[0, :-1, :61].argmax(-1)
    # Every second token is made the likeliest one of the tokens before it.
    tokens = TOKENS.clone()
    for place in range(1, 17, 2):
        tokens[place] = plain(input_ids=tokens[None, :place]).logits[0, -1, :61].argmax()
    found = policy(tokens, [17], MASK, likeliest=True).is_likeliest
    best = plain(input_ids=tokens[None]).logits[0, :-1, :61].argmax(-1)
    assert found is not None
    assert found.tolist() == (best == tokens[1:]).float().tolist()
    assert 0.4 < float(found.mean()) < 1.0
    assert policy(tokens, [17], MASK).is_likeliest is None


def test_a_run_shows_accuracy_and_speed(tmp_path: Path):
    tiny = [word for word in TINY if word.startswith(MODEL)]
    words = ("trainer.stage=sft", "data.train_files=arithmetic://sum?traces=1&size=8")
    words += ("data.val_files=arithmetic://sum?traces=1&size=8", "data.train_batch_size=8")
    words += ("trainer.total_training_steps=30", "trainer.test_freq=30", "trainer.logger=jsonl")
    words += ("trainer.total_epochs=30", "actor_rollout_ref.actor.optim.lr=2.0e-2")
    report = check([], [*tiny, *words, f"trainer.default_local_dir={tmp_path}"])
    assert report.is_sound, report.problems
    run_training(report)
    [file] = tmp_path.rglob("metrics.jsonl")
    lines = [line.values for line in read_metrics(file)]
    steps = [line for line in lines if "sft/accuracy" in line]
    assert len(steps) == 30
    assert all(line["time/tokens_per_s"] > 0 for line in steps)
    assert steps[0]["sft/accuracy"] < 0.2 < 0.3 < steps[-1]["sft/accuracy"]
    assert lines[0]["sft/val_accuracy"] == pytest.approx(steps[0]["sft/accuracy"])
    assert lines[-1]["sft/val_accuracy"] > 0.3
