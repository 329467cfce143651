"""On a GPU: 4-bit weights and 8-bit moments, their bytes, the gap to the sampler, and resuming."""

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.digests import read_digests
from luyen.config.schema.model import ModelConfig
from luyen.models.load import load_policy
from luyen.models.quantization import is_quantized, restored
from tests.runs import ACTOR, MODEL, train

pytestmark = pytest.mark.gpu

NF4 = (f"{MODEL}.quantization=nf4", f"{MODEL}.lora_rank=32")
LARGER = (
    f"{MODEL}.override_config={{num_hidden_layers: 2, hidden_size: 128, intermediate_size: 256, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 64, initializer_range: 0.2}"
)
KINDS = {
    "nf4": NF4,
    "nf4, plain scales": (*NF4, f"{MODEL}.double_quantization=false"),
    "nf4 in fp32": (*NF4, f"{MODEL}.dtype=float32"),
    "8-bit moments": (f"{ACTOR}.optim.name=adamw_8bit",),
    "8-bit moments of an adapter": (f"{ACTOR}.optim.name=adamw_8bit", f"{MODEL}.lora_rank=32"),
    "muon": (f"{ACTOR}.optim.name=muon",),
}


@pytest.fixture
def cuda(device: str) -> str:
    """CUDA, or no test."""
    if device != "cuda":
        pytest.skip("needs CUDA")
    return device


def chain(root: Path) -> list[str]:
    return [line.chain for line in read_digests(root / "digests.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_exactly_and_the_sampler_has_its_numbers(
    cuda: str, kind: str, tmp_path: Path
):
    words = (*KINDS[kind], LARGER, "trainer.device=cuda", "trainer.total_training_steps=4")
    words += ("trainer.save_freq=2",)
    ran = train(tmp_path, *words)
    assert ran.course("parity/max_gap") == [0.0] * 4
    before = chain(ran.root)
    shutil.rmtree(ran.root / "checkpoints" / "step_000004")
    train(tmp_path, *words)
    assert chain(ran.root) == before


def test_4_bit_weights_take_a_quarter_of_the_memory(cuda: str):
    sizes: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 4096}
    held: dict[str, int] = {}
    for kind in ("none", "nf4"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = ModelConfig(
            init="random", override_config=sizes, quantization=kind, lora_rank=8, dtype="bfloat16"
        )
        policy = load_policy(model, device=cuda, vocabulary=100)
        held[kind] = torch.cuda.memory_allocated() - before
        layers = [m for m in policy.modules() if is_quantized(m)]
        assert bool(layers) == (kind == "nf4")
        assert all(restored(layer).dtype == torch.bfloat16 for layer in layers)
        del policy, layers
    assert held["nf4"] < 0.4 * held["none"], held
