"""Laws of the simulated step: more work takes longer, and nothing is faster than its parts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.memory import plan_memory
from luyen.config.model_folder.config_json import ModelShape
from luyen.config.simulation.cost import (
    Cost,
    GenerationWork,
    ModelCost,
    PassWork,
    ShardCost,
    ShardLayout,
    decode_segments,
)
from luyen.config.simulation.hardware import H200
from luyen.config.simulation.step import RolloutLengths

GIB = 1024**3
SIZES = ("layers", "hidden", "heads", "intermediate", "vocab")
SHAPES = st.builds(
    ModelShape,
    layers=st.integers(1, 80),
    hidden=st.integers(8, 8192),
    heads=st.sampled_from([8, 16, 64]),
    kv_heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([64, 128]),
    intermediate=st.integers(8, 30000),
    vocab=st.integers(1000, 160_000),
    is_tied=st.booleans(),
)
WORKS = st.builds(
    GenerationWork,
    prompts=st.integers(1, 20),
    samples=st.integers(1, 8),
    prompt=st.integers(1, 500).map(lambda n: (n, n)),
    new=st.tuples(st.integers(1, 100), st.integers(0, 100)).map(lambda p: (p[0], p[0] + p[1])),
    rows=st.integers(1, 64),
)
COSTS = st.builds(Cost, **dict.fromkeys(("compute", "memory", "network", "sent"), st.floats(0, 9)))
ALMOST = 1 - 1e-9


def learned_pass(shape: ModelShape, work: PassWork) -> Cost:
    cost = ModelCost(shape=shape, hardware=H200)
    return cost.forward(work) + cost.backward(work, trains_all=True, recomputes=True)


@given(COSTS, COSTS, st.floats(0, 5))
def test_costs_add_and_repeat_part_by_part(a: Cost, b: Cost, times: float):
    assert (a + b).seconds == pytest.approx(a.seconds + b.seconds)
    assert a.times(times).seconds == pytest.approx(times * a.seconds)
    assert (a + b).sent == a.sent + b.sent


@given(WORKS)
def test_every_token_is_generated_once_in_rows_that_are_there(work: GenerationWork):
    lengths, segments = work.lengths(), list(decode_segments(work))
    assert sum(steps * rows for steps, rows, _ in segments) == sum(n - 1 for _, n in lengths)
    read = sum((new - 1) * prompt + new * (new - 1) // 2 for prompt, new in lengths)
    assert sum(contexts for _, _, contexts in segments) == read
    assert all(steps >= 0 and 1 <= rows <= work.rows for steps, rows, _ in segments)
    assert all(work.new[0] <= new <= work.new[1] for _, new in lengths)


@given(SHAPES, WORKS, st.sampled_from(SIZES), st.integers(1, 3))
def test_a_larger_model_takes_longer_in_every_way(shape, work, name: str, factor: int):
    larger = replace(shape, **{name: factor * getattr(shape, name)})
    tokens = PassWork(tokens=4096, scored=2048, context=500.0)
    small, large = (ModelCost(shape=s, hardware=H200) for s in (shape, larger))
    assert small.generation(work).seconds * ALMOST <= large.generation(work).seconds
    assert learned_pass(shape, tokens).seconds * ALMOST <= learned_pass(larger, tokens).seconds


@given(SHAPES, WORKS, st.integers(0, 10))
def test_more_prompts_take_longer_and_more_room_does_not(shape, work: GenerationWork, more: int):
    work = replace(work, new=(work.new[1],) * 2)
    cost = ModelCost(shape=shape, hardware=H200)
    longer = cost.generation(replace(work, prompts=work.prompts + more)).seconds
    roomy = cost.generation(replace(work, rows=work.rows * 2)).seconds
    assert roomy * ALMOST <= cost.generation(work).seconds <= longer / ALMOST


@given(SHAPES, st.sampled_from([1, 2, 8, 16, 64]), st.sampled_from([1, 2, 4]), st.floats(0, 2))
def test_ranks_hide_transfers_and_never_work(shape, share: int, copies: int, busy: float):
    layout = ShardLayout(world=share * copies, share=share, ranks_per_sequence=1)
    shards = ShardCost(shape=shape, hardware=H200, layout=layout, learned=shape.parameters())
    device = Cost(compute=busy)
    scored, learned = (shards.around(device, learns=learns) for learns in (False, True))
    alone = shards.around(Cost(), learns=True)
    assert busy <= scored.seconds <= learned.seconds / ALMOST
    assert learned.seconds <= (busy + alone.seconds) / ALMOST
    assert learned.sent >= scored.sent
    slow = replace(shards, hardware=H200.with_values({"link_rate": 45e9, "network_rate": 5e9}))
    assert slow.around(device, learns=True).seconds >= learned.seconds * ALMOST


@given(SHAPES, st.sampled_from([2, 4, 8, 16, 64]))
def test_memory_of_ranks_is_at_least_their_part(shape: ModelShape, ranks: int):
    machine = Machine(cpus=1, ram_bytes=GIB, gpu_bytes=(1 << 60,) * 64)

    def trained(gpus: int) -> dict[str, int]:
        words = (f"trainer.nnodes={max(1, gpus // 8)}", f"trainer.n_gpus_per_node={min(8, gpus)}")
        more = ("data.train_files=arithmetic://sum", "trainer.device=cuda")
        report = check([], (*more, *words), machine=machine)
        plan = report.plan
        memory = plan_memory(report.config, shape, plan.batch, plan.where, machine)
        return next(phase.parts for phase in memory.phases if phase.name == "update")

    alone, together = trained(1), trained(ranks)
    # Alone there are rounded weights beside the masters, which shards are themselves.
    kept = alone["optimizer"]
    # Both parts are rounded down.
    assert together["weights"] + together["optimizer"] >= kept / ranks - 2
    assert together["optimizer"] <= kept


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_answers_are_spread_evenly_around_their_mean(mean: int, most: int):
    mean = min(mean, most)
    low, high = RolloutLengths(prompt=1, answer=mean).answers(most=most)
    assert 1 <= low <= mean <= high <= most
    assert low + high == 2 * mean
