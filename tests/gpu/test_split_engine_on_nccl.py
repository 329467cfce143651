"""Ranks on NCCL that share an engine generate what one process generates on this GPU.

2 and 4 ranks share the GPU; decode steps are captured as graphs, or eager. Bars (fp32):
log-probabilities 1e-4 absolute; the first greedy token that differs is nearly as likely. Without a
GPU the same code runs with gloo: `tests/unit/runtime/test_split_engine.py`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_models import DEVICE
from tests.unit.runtime.test_split_engine import MORE_SHAPES, SHAPES, demand_same, run_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE != "cuda" or not torch.cuda.is_available(),
        reason="needs a GPU and LUYEN_TEST_DEVICE=cuda",
    ),
]


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_on_nccl_generate_what_one_process_does(
    tmp_path: Path, name: str, *, is_eager: bool
):
    shape = replace(SHAPES[name], engine={"is_eager": is_eager})
    run_shapes(tmp_path, {name: shape}, 2)
    demand_same(tmp_path, name, shape, 2)


@pytest.mark.parametrize("name", MORE_SHAPES)
def test_four_ranks_on_nccl_generate_what_one_process_does(tmp_path: Path, name: str):
    run_shapes(tmp_path, {name: MORE_SHAPES[name]}, 4)
    demand_same(tmp_path, name, MORE_SHAPES[name], 4)
