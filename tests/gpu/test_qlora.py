"""On a GPU: QLoRA as a user runs it. The loss falls, the run resumes, its adapter is used."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from luyen.base.digests import read_digests
from luyen.serve.model import open_model
from luyen.telemetry.metrics import read_metrics
from tests.architecture.tree import ROOT
from tests.e2e.tiny import luyen
from tests.runs import ACTOR, MODEL
from tests.serving import running

pytestmark = pytest.mark.gpu

STEPS = 60
KINDS = {
    "bf16, 8-bit moments": ("bfloat16", "adamw_8bit"),
    "fp32, 8-bit moments": ("float32", "adamw_8bit"),
    "bf16, AdamW": ("bfloat16", "adamw"),
}
ROWS = "data.val_files=arithmetic://sum?traces=1&split=held-out&size=32"


def train(folder: Path, dtype: str, optimizer: str, *words: str) -> Path:
    """The directory of a run of the recipe to its end."""
    done = luyen(
        "train",
        ROOT / "recipes/qlora_sft.yaml",
        "trainer.device=cuda",
        f"trainer.default_local_dir={folder}",
        f"{MODEL}.dtype={dtype}",
        f"{ACTOR}.optim.name={optimizer}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=20",
        "trainer.logger=jsonl",
        ROWS,
        *words,
    )
    assert done.exit_code == 0, done.output
    return folder / "luyen" / "qlora_sft"


def losses(run: Path, name: str = "sft/val_nll") -> list[float]:
    lines = read_metrics(run / "metrics.jsonl")
    return [line.values[name] for line in lines if name in line.values]


def accuracy(model: str | Path, *words: str) -> float:
    """The share of 64 held-out sums that the model solves."""
    rows = ("--data", "arithmetic://sum?digits=2&split=held-out&size=64", "--reward", "numeric")
    done = luyen("eval", model, *rows, "--json", *words)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found["metrics"]["val/accuracy"]


def on_cuda(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs CUDA")


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_a_resumed_run_has_the_bits_of_one_that_was_not(
    device: str, kind: str, tmp_path: Path
):
    on_cuda(device)
    run = train(tmp_path, *KINDS[kind])
    course = losses(run)
    print(f"\n{kind}: loss of held-out rows {' -> '.join(f'{value:.4f}' for value in course)}")
    assert course[-1] < 0.7 * course[0]
    before = [line.chain for line in read_digests(run / "digests.jsonl")]
    for step in (40, STEPS):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06}")
    train(tmp_path, *KINDS[kind])
    assert [line.chain for line in read_digests(run / "digests.jsonl")] == before
    assert len(before) == STEPS + 1  # the weights of the beginning, then every step


def test_the_adapter_is_measured_served_and_exported(device: str, tmp_path: Path):
    """All three give the answers of the same weights."""
    on_cuda(device)
    run = train(tmp_path, *KINDS["bf16, 8-bit moments"])
    made = luyen("export", run, tmp_path / "adapter")
    assert made.exit_code == 0, made.output
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert names
    assert all("lora_" in name for name in names)
    made = luyen("export", run, tmp_path / "whole", "--merge")
    assert made.exit_code == 0, made.output
    own = accuracy(run)
    merged = accuracy(tmp_path / "whole", "trainer.device=cuda")
    print(f"\nsums solved: {own:.3f} with 4-bit weights, {merged:.3f} merged")
    assert own >= 0.9
    assert abs(own - merged) <= 0.05
    served = open_model(str(run), name=None, overrides=(), is_trusted=False)
    with running(served) as server:
        reply = server.chat("12+34=", temperature=0, max_tokens=64)
    assert reply.status == 200, reply.raw
    assert reply.body["choices"][0]["message"]["content"].rstrip().endswith("46")
