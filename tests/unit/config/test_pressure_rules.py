"""What a tight memory, a small reference pass and a large batch are said to need."""

from pathlib import Path

import pytest

from luyen.config.check import check
from luyen.config.machine import Machine

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SMALL = Machine(cpus=16, ram_bytes=64 * 2**30, gpu_bytes=(4 * 2**30,))
SHAPE = (
    f"{MODEL}.override_config={{hidden_size: 2048, num_hidden_layers: 64}}",
    f"{MODEL}.init=random",
    "data.train_files=arithmetic://sum?digits=1&size=32",
    "trainer.device=cuda",
)


def remedies(*words: str) -> list[str]:
    report = check([], [*SHAPE, *words], machine=SMALL)
    (problem,) = [p for p in report.problems if p.id == "P02"]
    return problem.fix.split(", then ")


def test_remedies_come_in_order_and_only_those_that_are_left() -> None:
    first = remedies(f"{MODEL}.enable_gradient_checkpointing=false")
    keys = ("ppo_max_token_len_per_gpu", "gradient_checkpointing", "free_cache_engine", "lora_rank")
    found = [next(i for i, fix in enumerate(first) if key in fix) for key in keys]
    assert found == sorted(found)
    assert not any("activation_offload" in fix for fix in first)
    second = remedies(f"{MODEL}.enable_gradient_checkpointing=true")
    assert not any("gradient_checkpointing" in fix for fix in second)
    assert any("activation_offload" in fix for fix in second)


@pytest.mark.parametrize(("size", "is_small"), [(1, True), (16, False)])
def test_a_counted_reference_beside_a_dynamic_actor_is_compared_in_tokens(
    size: int, is_small: bool
) -> None:
    words = (
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={size}",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
    )
    report = check([], [*SHAPE, *words], machine=SMALL)
    assert ("K05" in {p.id for p in report.problems}) == is_small


def found(*words: str) -> dict[str, str]:
    """Rule -> the key of its finding."""
    return {p.id: p.field for p in check([], [*SHAPE, *words], machine=SMALL).problems}


@pytest.mark.parametrize("side", ["ref", "rollout"])
def test_counted_log_probs_beside_a_dynamic_actor_need_a_size(side: str) -> None:
    """Without one they would run a sequence at a time, which no key says."""
    key = f"actor_rollout_ref.{side}.log_prob"
    words = (f"{ACTOR}.use_kl_loss=true", f"{key}_use_dynamic_bsz=false")
    assert found(*words)["B06"] == f"{key}_micro_batch_size_per_gpu"
    assert "B06" not in found(*words, f"{key}_micro_batch_size_per_gpu=4")
    counted = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    assert "B06" not in found(*words, *counted), "the size of the actor's update is theirs"


def test_a_reference_cut_by_tokens_takes_the_budget_of_the_actor() -> None:
    words = (
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
    )
    assert found(*words)["K05"] == "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    assert "K05" not in found(*words, f"{ACTOR}.ppo_max_token_len_per_gpu=16384")


def test_python_tools_need_room_in_the_prompt_as_listed_ones_do(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def add(a: int) -> int:\n    return a\n")
    turns = "actor_rollout_ref.rollout.multi_turn"
    words = (f"{turns}.enable=true", f"{turns}.function_tool_path={tmp_path / 'tools.py'}")
    assert found(*words, "data.max_prompt_length=128")["T03"] == "data.max_prompt_length"
    assert "T03" not in found(*words, "data.max_prompt_length=1024")


def test_waves_of_hf_are_groups_of_one_prompt() -> None:
    """8 prompts of 4 samples are 8 waves of `hf`, and one of an engine that holds 256 sequences."""
    words = ("data.train_batch_size=8", f"{ROLLOUT}.n=4", "algorithm.adv_estimator=grpo")
    report = check([], [*SHAPE, *words, f"{ROLLOUT}.name=hf"], machine=SMALL)
    (problem,) = [p for p in report.problems if p.id == "R20"]
    assert "holds 4 sequences at once" in problem.why
    assert "about 8 waves" in problem.why
    assert "R20" not in found(*words)
