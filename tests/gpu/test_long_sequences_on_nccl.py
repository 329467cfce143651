"""Four ranks of one GPU train a sequence of 128k tokens together, with a quarter of the memory.

A model of the width and vocabulary of Qwen2.5-0.5B, in bf16. One process computes the same step for
comparison.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.algorithms.objective import Objective
from luyen.config.schema.actor_rollout_ref import FsdpConfig, OptimConfig
from luyen.engine.actor import merge_policy_updates, prepare_update
from luyen.engine.batch import MicroBatching, PackedBatch, pack, split_batch
from luyen.engine.fsdp import leave_ranks
from luyen.models.random_policy import shaped_policy
from luyen.runtime.training import RankPlace, training_engines
from tests.tiny_models import DEVICE
from tests.unit.engine.fsdp_job import claim_host
from tests.worlds import run_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE != "cuda" or not torch.cuda.is_available(),
        reason="needs a GPU and LUYEN_TEST_DEVICE=cuda",
    ),
]
TOKENS = int(os.environ.get("LUYEN_TEST_TOKENS", 131_072))
SHORT = TOKENS // 8
RANKS = 4
OBJECTIVE = Objective(loss="vanilla")
OPTIM = OptimConfig(lr=1e-6)


def one_sequence(length: int) -> PackedBatch:
    """A prompt of 64 tokens and one answer, with advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 150_000, (length,), generator=generator)
    mask = [int(index >= 64) for index in range(length)]
    batch = pack([tokens.tolist()], masks=[mask], groups=[0])
    return batch.with_streams(advantages=torch.randn(length, generator=generator))


def step(place: RankPlace, config: FsdpConfig, engine: str) -> dict[str, Any]:
    """An update on the sequence: loss, norm, and memory of its activations.

    What a pass takes for weights, gradients and a chunk of logits does not depend on the number of
    tokens: it is left out by the difference to a short sequence.
    """
    policy = shaped_policy("qwen2.5-0.5b", dtype=torch.bfloat16, device=place.device)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    passes = MicroBatching(max_tokens=TOKENS // place.ranks)
    actor = training_engines.get(engine)(place, config).actor(
        policy, OPTIM, passes, temperature=1.0
    )
    done, peaks, batch, shard = None, list[int](), None, None
    for length in (SHORT, SHORT, TOKENS):  # the first update makes gradients and moments
        batch, numbers = prepare_update(one_sequence(length), OBJECTIVE, {})
        [shard] = split_batch(batch, passes.on_ranks(place.ranks), ranks=1)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        done = actor.update_shard(shard, OBJECTIVE, lr=1e-6, statistics=numbers)
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert done is not None
    assert batch is not None
    merged = merge_policy_updates(batch, [shard], [done])
    return {
        "loss": merged.metrics["actor/pg_loss"],
        "norm": merged.stepped.grad_norm,
        "whole pass": peaks[-1],
        "activations": peaks[-1] - peaks[-2],
    }


def be_rank(root: Path, rank: int) -> None:
    claim_host(rank)
    config = FsdpConfig(ulysses_sequence_parallel_size=RANKS)
    place = RankPlace(
        device=DEVICE, rank=rank, ranks=RANKS, address=f"file://{root}/meeting", timeout_s=300
    )
    torch.save(step(place, config, "fsdp2"), root / f"{rank}.pt")
    leave_ranks()


def test_a_sequence_of_128k_tokens_takes_a_quarter_of_the_memory_on_each_of_four_ranks(
    tmp_path: Path,
):
    run_together(be_rank, [(tmp_path, rank) for rank in range(RANKS)], tmp_path, limit_s=400)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    alone = step(RankPlace(device=DEVICE), FsdpConfig(), "single")
    print("alone", alone, "ranks", ranks)
    for found in ranks:
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1.4e-2)
        assert found["activations"] < 0.27 * alone["activations"]
        assert found["whole pass"] < 0.6 * alone["whole pass"]
