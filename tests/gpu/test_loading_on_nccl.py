"""A model that is loaded into host memory takes no more of a GPU than a rank's part of it.

4 ranks share the GPU. What they compute is the subject of the other tests on NCCL.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.config.schema.actor_rollout_ref import FsdpConfig
from luyen.engine.fsdp import leave_ranks, take_apart
from luyen.models.policy import Policy
from luyen.runtime.split_engine import EngineRanks
from luyen.runtime.training import ModelsOnRanks, RankPlace, training_engines
from tests.tiny_models import DEVICE, VOCABULARY, tiny_net
from tests.unit.engine.fsdp_job import claim_host
from tests.worlds import run_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE != "cuda" or not torch.cuda.is_available(),
        reason="needs a GPU and LUYEN_TEST_DEVICE=cuda",
    ),
]
RANKS = 4
FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "sharded": ({}, 0.35),
    "divided and sharded": ({"tensor_parallel_size": 2}, 0.6),
    "divided for generation": ({}, 0.35),
}
"""Options, and the most of a whole model that is on a rank's device at a time.

A quarter and one layer; halves are whole on the device before they are sharded.
"""


def host_policy() -> Policy:
    """300 million weights, nearly all of them in 24 equal layers."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    net = tiny_net("llama", **sizes, **heads).bfloat16()
    return Policy(net, vocabulary=VOCABULARY, device=torch.device(DEVICE)).eval()


def be_rank(root: Path, rank: int, name: str) -> None:
    claim_host(rank)
    place = RankPlace(
        device=DEVICE, rank=rank, ranks=RANKS, address=f"file://{root}/meeting", timeout_s=300
    )
    policy = host_policy()
    take_apart(policy)  # measures products once, with matrices of many rows
    if name == "divided for generation":
        lay_out: Any = EngineRanks(place).divide
        whole = sum(p.nbytes for p in policy.parameters())
    else:
        engine = training_engines.get("fsdp2")(place, FsdpConfig(**FORMS[name][0]))
        assert isinstance(engine, ModelsOnRanks)
        lay_out = engine.lay_out
        whole = sum(p.numel() * 4 for p in policy.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lay_out(policy)
    peak = torch.cuda.max_memory_allocated() - before
    places = {tensor.device.type for tensor in (*policy.parameters(), *policy.buffers())}
    torch.save({"share": peak / whole, "places": places}, root / f"{rank}.pt")
    leave_ranks()


@pytest.mark.parametrize("name", FORMS)
def test_no_rank_has_much_more_than_its_part_on_the_gpu_while_a_model_is_laid_out(
    tmp_path: Path, name: str
):
    ranks = [(tmp_path, rank, name) for rank in range(RANKS)]
    run_together(be_rank, ranks, tmp_path, limit_s=400)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        print(name, rank, found)
        assert 0.24 < found["share"] < FORMS[name][1]
        assert found["places"] == {"cuda"}
