"""What a tight memory, a small reference pass and a large batch are said to need."""

import pytest

from luyen.config.check import check
from luyen.config.machine import Machine

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
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
