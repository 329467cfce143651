"""Ranks that share an engine generate what one process generates.

Bars (fp32): log-probabilities 1e-4 absolute; greedy tokens are equal, or the first that differs is
nearly as likely. Two ranks give the log-probabilities of a trainer of two ranks to the bit on CPUs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.rollout.protocol import Completion
from tests.generation import plain_logits
from tests.unit.runtime.split_job import (
    Found,
    Shape,
    alone,
    be_rank,
    make_policy,
    requests,
    stop_a_rank,
)
from tests.worlds import forks, run_together

BAR = 1e-4
SHAPES = {
    "llama": Shape(),
    "qwen2, tied, adapter": Shape(kind="qwen2", lora_rank=4),
    "qwen3 mixture": Shape(kind="qwen3_moe"),
}
MORE_SHAPES = {
    "qwen3, more ranks than key heads": Shape(kind="qwen3"),
    "mixtral, one expert a rank": Shape(kind="mixtral"),
}
"""With 4 ranks."""


def run_shapes(folder: Path, shapes: dict[str, Shape], world: int) -> Path:
    """Every shape on ranks, and in this process."""
    run_together(be_rank, [(folder, world, r, shapes) for r in range(world)], folder, limit_s=300)
    for name, shape in shapes.items():
        torch.save(alone(shape), folder / f"{name}_alone.pt")
    return folder


def demand_same(folder: Path, name: str, shape: Shape, world: int) -> dict[str, Any]:
    """Compare what ranks generated with what one process did."""
    found, whole = (
        torch.load(folder / f"{name}_{n}.pt", weights_only=False) for n in (world, "alone")
    )
    demand_answers(found["first"], whole["first"], shape)
    demand_answers(found["then"], whole["then"], None)
    assert found["digests"] == whole["digests"], "what was published is what the ranks hold"
    assert {key: c.tokens for key, c in found["then"].items()} != {
        key: c.tokens for key, c in found["first"].items()
    }, "they generate with it"
    assert [c.reason for c in found["aborted"]] == ["aborted"] * 2
    for key, completion in found["first"].items():
        gap = found["scores"]["{} {}".format(*key)] - torch.tensor(completion.logps)
        assert gap.abs().max() <= BAR
    return found


def demand_answers(found: Found, whole: Found, shape: Shape | None) -> None:
    asked = {one.id: one for one in requests()}
    assert found.keys() == whole.keys()
    for key, completion in found.items():
        same = common(completion, whole[key])
        assert same > 0
        gaps = torch.tensor(completion.logps[:same]) - torch.tensor(whole[key].logps[:same])
        assert gaps.abs().max() <= BAR, key
        if same == len(completion.tokens) == len(whole[key].tokens):
            continue
        assert shape is not None, f"{key} differs at {same}"
        assert asked[key[0]].sampling.is_greedy, f"{key} differs at {same}"
        before = (*asked[key[0]].tokens, *completion.tokens[:same])
        logits = plain_logits(make_policy(shape), before)[-1]
        both = logits[[completion.tokens[same], whole[key].tokens[same]]]
        assert (logits.max() - both).max() <= BAR, "a near tie"


def common(one: Completion, other: Completion) -> int:
    """How many tokens two answers begin with."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.tokens, other.tokens)))
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_shapes(tmp_path_factory.mktemp("two"), SHAPES, 2)


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_generate_what_one_process_does(two_ranks: Path, name: str):
    found = demand_same(two_ranks, name, SHAPES[name], 2)
    assert found["is_batch_invariant"]
    for key, completion in found["first"].items():
        assert found["scores"]["{} {}".format(*key)].tolist() == list(completion.logps), key


def test_a_rank_has_half_of_what_is_divided(two_ranks: Path):
    whole = sum(p.nbytes for p in make_policy(SHAPES["llama"]).parameters())
    own = torch.load(two_ranks / "llama_2.pt", weights_only=False)["bytes"]
    assert whole / 2 < own < 0.52 * whole


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_SHAPES)
def test_four_ranks_generate_what_one_process_does(tmp_path: Path, name: str):
    run_shapes(tmp_path, {name: MORE_SHAPES[name]}, 4)
    found = demand_same(tmp_path, name, MORE_SHAPES[name], 4)
    assert not found["is_batch_invariant"], "four parts are added in an order of places"


def test_a_rank_with_another_weight_and_one_that_stands_still_are_errors(tmp_path: Path):
    ranks = [forks().Process(target=stop_a_rank, args=(tmp_path, r), daemon=True) for r in (0, 1)]
    for one in ranks:
        one.start()
    ranks[0].join(240)
    for one in ranks:
        one.kill()
        one.join()
    told = torch.load(tmp_path / "told.pt")
    assert "on rank 1 is not that of the first rank" in told["weights"]
    assert "Timed out" in told["advance"]
    assert told["fingerprint"]
    assert told["seconds"] < 60, "no longer than timeout_s for each call"
