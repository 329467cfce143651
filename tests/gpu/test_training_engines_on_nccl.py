"""Every training engine on NCCL learns what `single` learns on this GPU.

2 and 4 ranks share the GPU. The forms are those of gloo on CPUs: sharded weights, copies, layers
that 2 and 4 ranks divide. fp32: losses 1e-5, norms of gradients 1e-4 relative, scores 1e-4.
"""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import DEVICE
from tests.unit.engine.test_training_engines import (
    FORMS,
    MEGATRON,
    MORE_FORMS,
    MORE_MEGATRON,
    demand_conformance,
    megatron_is_there,
    run_forms,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE != "cuda" or not torch.cuda.is_available(),
        reason="needs a GPU and LUYEN_TEST_DEVICE=cuda",
    ),
]

# Rows of the vocabulary are scored by kernels that read one weight: `Policy` refuses an adapter of
# the output layer on a GPU.
ON_GPU = {name: form for name, form in FORMS.items() if "lm_head" not in form.target_modules}


@pytest.mark.parametrize("name", [*ON_GPU, *MORE_FORMS])
def test_an_engine_on_nccl_learns_what_single_learns(tmp_path: Path, name: str):
    run_forms(tmp_path, {name: {**FORMS, **MORE_FORMS}[name]}, (4,))
    demand_conformance(tmp_path, name, 4)


@pytest.mark.parametrize("name", ON_GPU)
def test_two_ranks_on_nccl_learn_what_single_learns(tmp_path: Path, name: str):
    run_forms(tmp_path, {name: FORMS[name]}, (2,))
    demand_conformance(tmp_path, name, 2)


@megatron_is_there
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_on_nccl_learns_what_single_learns(tmp_path: Path, name: str, world: int):
    run_forms(tmp_path, {name: MEGATRON[name]}, (world,))
    demand_conformance(tmp_path, name, world)


@megatron_is_there
@pytest.mark.parametrize("name", MORE_MEGATRON)
def test_megatron_on_four_nccl_ranks_divides_layers_and_experts(tmp_path: Path, name: str):
    run_forms(tmp_path, {name: MORE_MEGATRON[name]}, (4,))
    demand_conformance(tmp_path, name, 4)
