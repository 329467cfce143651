"""Every training engine learns what `single` learns, by the methods of its protocol alone.

Bars (fp32): losses 1e-5 absolute, norms of gradients 1e-4 relative, log-probabilities and values
1e-4 absolute. Digests are equal to the bit where weights are: at the start, and after loading.
"""

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.config.catalog import TRAINING_ENGINES
from luyen.engine.fsdp import join_ranks, leave_ranks
from luyen.engine.tensor_parallel import divide_layers
from luyen.runtime.training import RankPlace
from tests.tiny_models import DEVICE, tiny_policy
from tests.unit.engine.conformance_job import (
    SAVED_AT,
    STEPS,
    Course,
    Form,
    be_rank,
    make_policy,
    run,
)
from tests.worlds import run_together

TWO = {"tensor_parallel_size": 2}
FORMS = {
    "whole": Form(),
    "copies": Form(config={"fsdp_size": 1}),
    "layers, qwen2, tied": Form(config=TWO, kind="qwen2", model={"tie_word_embeddings": True}),
    "layers, adapter of the output layer": Form(
        config=TWO, lora_rank=4, target_modules=("q_proj", "lm_head")
    ),
    "mixture, balanced, recomputed": Form(
        kind="qwen3_moe", is_checkpointed=True, router_aux_loss_coef=0.1
    ),
    "experts and a shared one, balanced, recomputed": Form(
        config=TWO, kind="qwen2_moe", is_checkpointed=True, router_aux_loss_coef=0.1
    ),
}
MORE_FORMS = {
    "qwen3, more ranks than key heads": Form(config={"tensor_parallel_size": 4}, kind="qwen3"),
    "llama, adapter": Form(config=TWO, lora_rank=4),
    "qwen3, adapter, more ranks than key heads": Form(
        config={"tensor_parallel_size": 4}, kind="qwen3", lora_rank=4
    ),
    "llama, biases, recomputed": Form(
        config=TWO, model={"attention_bias": True, "mlp_bias": True}, is_checkpointed=True
    ),
    "mistral, one sequence": Form(config=TWO, kind="mistral", sequences=1),
    "qwen3, kept gathered": Form(config={**TWO, "reshard_after_forward": False}, kind="qwen3"),
    "mixtral, idle ranks, balanced": Form(kind="mixtral", sequences=1, router_aux_loss_coef=0.1),
    "llama, offloaded": Form(
        config={**TWO, "param_offload": True, "optimizer_offload": True}, kind="llama"
    ),
    "qwen3 mixture, experts, adapter": Form(config=TWO, kind="qwen3_moe", lora_rank=4),
    "mixtral, one expert a rank, one sequence": Form(
        config={"tensor_parallel_size": 4}, kind="mixtral", sequences=1, router_aux_loss_coef=0.1
    ),
}
"""With 4 ranks, and with 4 only where they divide layers by 4."""
MEGATRON = {
    "llama, whole layers": Form(engine="megatron"),
    "qwen2, divided layers, tied": Form(
        engine="megatron", config=TWO, kind="qwen2", model={"tie_word_embeddings": True}
    ),
    "qwen3, divided layers, recomputed": Form(
        engine="megatron", config=TWO, kind="qwen3", is_checkpointed=True
    ),
    "qwen3_moe, whole experts, balanced, recomputed": Form(
        engine="megatron", kind="qwen3_moe", is_checkpointed=True, router_aux_loss_coef=0.1
    ),
    "qwen2_moe, divided layers": Form(
        engine="megatron", config=TWO, kind="qwen2_moe", router_aux_loss_coef=0.1
    ),
    "qwen2_moe, experts over ranks, recomputed": Form(
        engine="megatron",
        config={"expert_parallel_size": 2},
        kind="qwen2_moe",
        is_checkpointed=True,
    ),
    "qwen3_moe, experts over ranks, replayed": Form(
        engine="megatron",
        config={"expert_parallel_size": 2},
        kind="qwen3_moe",
        is_checkpointed=True,
        is_replayed=True,
    ),
    "mixtral, divided layers": Form(
        engine="megatron", config=TWO, kind="mixtral", router_aux_loss_coef=0.1
    ),
    "qwen3_moe, experts over ranks, idle ranks, recomputed": Form(
        engine="megatron",
        config={"expert_parallel_size": 2},
        kind="qwen3_moe",
        sequences=1,
        is_checkpointed=True,
        router_aux_loss_coef=0.1,
    ),
    "qwen3_moe, experts over ranks, a dense layer": Form(
        engine="megatron",
        config={"expert_parallel_size": 2},
        kind="qwen3_moe",
        model={"mlp_only_layers": [0], "norm_topk_prob": False, "num_hidden_layers": 3},
        router_aux_loss_coef=0.1,
    ),
}
MORE_MEGATRON = {
    "qwen3, shards of divided layers": Form(engine="megatron", config=TWO, kind="qwen3"),
    "qwen3_moe, divided layers and experts": Form(
        engine="megatron",
        config={**TWO, "expert_parallel_size": 2},
        kind="qwen3_moe",
        router_aux_loss_coef=0.1,
    ),
    "mixtral, copies of divided experts": Form(
        engine="megatron",
        config={"expert_parallel_size": 2},
        kind="mixtral",
        router_aux_loss_coef=0.1,
    ),
}
"""With 4 ranks alone."""
LOSSES = (
    *("actor/pg_loss", "actor/kl_loss", "critic/vf_loss"),
    *("router/aux_loss", "router/changed_routes"),
)


def run_forms(folder: Path, forms: dict[str, Form], worlds: tuple[int, ...]) -> Path:
    """Every form in every world, after `single` has trained and saved the same models."""
    for name, form in forms.items():
        found = run(form.alone, RankPlace(device=DEVICE), folder / "single" / name, None)
        torch.save(found, folder / f"{name}_alone.pt")
    for world in worlds:
        ranks = [(folder, world, rank, forms) for rank in range(world)]
        run_together(be_rank, ranks, folder, limit_s=60 * max(5, len(forms)))
    return folder


def demand_conformance(folder: Path, name: str, world: int) -> None:
    found, alone = (torch.load(folder / f"{name}_{n}.pt") for n in (world, "alone"))
    demand_equal_steps(found["steps"], alone["steps"])
    demand_equal_steps(found["again"], alone["steps"][SAVED_AT:])
    demand_equal_steps(found["continued"], alone["steps"][SAVED_AT:])
    assert found["digests"][0] == alone["digests"][0], "the same weights before the first step"
    assert found["loaded"] == found["digests"][1] != found["after"], "what was saved is loaded"
    assert found["loaded of single"] == alone["digests"][1], "of one process too"
    assert found["weights"].keys() == alone["weights"].keys()
    for key, weight in alone["weights"].items():
        assert found["weights"][key].dtype == weight.dtype
        torch.testing.assert_close(found["weights"][key], weight, rtol=0, atol=1e-4)


def demand_equal_steps(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        for name, stream in theirs["streams"].items():
            torch.testing.assert_close(mine["streams"][name], stream, rtol=0, atol=1e-4)
        for role in ("actor", "critic"):
            assert mine[role].keys() == theirs[role].keys()
            assert mine[role]["norm"] == pytest.approx(theirs[role]["norm"], rel=1e-4)
            for name in set(LOSSES) & theirs[role].keys():
                assert mine[role][name] == pytest.approx(theirs[role][name], rel=0, abs=1e-5)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forms(tmp_path_factory.mktemp("forms"), FORMS, (2,))


@pytest.mark.parametrize("name", FORMS)
def test_an_engine_learns_what_single_learns(forms: Path, name: str):
    demand_conformance(forms, name, 2)


megatron_is_there = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: the extra `megatron`"
)


@pytest.fixture(scope="module")
def megatron_forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forms(tmp_path_factory.mktemp("megatron"), MEGATRON, (2,))


@megatron_is_there
@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_learns_what_single_learns(megatron_forms: Path, name: str):
    demand_conformance(megatron_forms, name, 2)


@pytest.mark.slow
@megatron_is_there
@pytest.mark.parametrize("name", MORE_MEGATRON)
def test_megatron_on_four_ranks_shards_what_is_divided(tmp_path: Path, name: str):
    run_forms(tmp_path, {name: MORE_MEGATRON[name]}, (4,))
    demand_conformance(tmp_path, name, 4)


@megatron_is_there
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_megatron_on_one_rank_learns_what_single_learns(tmp_path: Path, kind: str):
    form = Form(engine="megatron", kind=kind, model={"tie_word_embeddings": True})
    run_forms(tmp_path, {"one": form}, (1,))
    demand_conformance(tmp_path, "one", 1)


def test_one_process_continues_what_ranks_that_divide_layers_have_saved(forms: Path):
    name = "layers, qwen2, tied"
    saved = torch.load(forms / f"{name}_2.pt")
    course = Course(FORMS[name].alone, RankPlace(device=DEVICE))
    course.load(forms / f"world_2_{[*FORMS].index(name)}")
    assert course.digests() == saved["digests"][1]
    steps = [course.step(number) for number in range(SAVED_AT, STEPS)]
    demand_equal_steps(saved["again"], steps)


def test_unknown_layers_and_sizes_that_do_not_divide_are_refused():
    mesh: Any = SimpleNamespace(size=lambda: 4)
    with pytest.raises(UserError, match="not known"):
        divide_layers(tiny_policy("gemma2"), mesh)
    with pytest.raises(UserError, match="intermediate_size of LlamaForCausalLM is 98"):
        divide_layers(tiny_policy("llama", intermediate_size=98), mesh)
    form = Form(lora_rank=4, target_modules=("q_proj", "embed_tokens"))
    with pytest.raises(UserError, match="embedding of LlamaForCausalLM has an adapter"):
        divide_layers(make_policy(form, lora_rank=4), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_FORMS)
def test_four_ranks_divide_more_models(tmp_path: Path, name: str):
    run_forms(tmp_path, {name: MORE_FORMS[name]}, (4,))
    demand_conformance(tmp_path, name, 4)


def demand_timeouts(folder: Path, rank: int) -> None:
    mesh = join_ranks(rank, 4, f"file://{folder}/meeting", tensor_size=2, timeout_s=77)
    for dimension in range(mesh.ndim):
        backend: Any = mesh.get_group(dimension)._get_backend(torch.device("cpu"))
        assert (backend.size(), backend.options._timeout) == (2, timedelta(seconds=77))
    leave_ranks()


def test_ranks_that_divide_layers_wait_for_each_other_as_long_as_all(tmp_path: Path):
    run_together(demand_timeouts, [(tmp_path, rank) for rank in range(4)], tmp_path, limit_s=120)


def test_every_engine_on_many_devices_is_tried():
    tried = {form.engine for form in (*FORMS.values(), *MEGATRON.values())}
    assert tried == {name for name, facts in TRAINING_ENGINES.items() if facts.splits}
