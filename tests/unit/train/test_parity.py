"""What a step says about the gap between sampler and trainer, and where it was largest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luyen.algorithms.parity import GapInputs, split_gap
from luyen.base.records import Branch, GroupId, Rollout, Score, Source, StopReason
from luyen.rollout.single_turn import Group
from luyen.telemetry.rollout_files import read_rollouts
from luyen.train.batch import batch_order, pack_groups
from luyen.train.metrics import gap_inputs, worst_tokens
from luyen.train.scoring import generate_and_score
from luyen.train.update import group_advantages, prepare_batch, update_roles
from tests.runs import ACTOR, MODEL, ROLLOUT, close, prepare, train

P, S, T = Source.PROMPT, Source.SAMPLED, Source.TOOL
HALF = f"{MODEL}.dtype=bfloat16"
TOP_P = f"{ROLLOUT}.top_p=0.8"


def rollout(sample: int = 0) -> Rollout:
    """A prompt of two tokens, two drawn, one of a tool, one drawn."""
    return Rollout(
        group=GroupId(step=4, draw=0, uid="a"),
        sample=sample,
        tokens=(5, 6, 7, 8, 9, 10),
        sources=(P, P, S, S, T, S),
        turns=(0, 0, 0, 0, 0, 1),
        logps=(None, None, -1.0, -2.0, None, -3.0),
        versions=(None, None, 3, 3, None, 3),
        stop=StopReason.ANSWERED,
        text="",
        score=Score(name="reward", value=1.0),
    )


def known(rollouts: list[Rollout], logp: list[float]) -> GapInputs:
    groups = [Group(prompt=None, rollouts=tuple(rollouts))]
    batch = pack_groups(groups)
    return gap_inputs(batch_order(groups), batch, batch.scatter(torch.tensor(logp)), version=3)


def sampled_places(rollouts) -> torch.Tensor:
    """Where sampled tokens stand in the batch of these rollouts."""
    sources = [source for r in rollouts for branch in r.branches for source in branch.sources]
    return torch.tensor([i for i, source in enumerate(sources) if source == Source.SAMPLED])


def test_a_token_of_older_weights_is_stale_and_no_other():
    assert known([rollout()], [0.0] * 3).is_stale.tolist() == [False] * 3
    mixed = replace(rollout(1), versions=(None, None, 2, 3, None, 3))
    found = known([rollout(), mixed], [0.0] * 6)
    assert found.is_stale.tolist() == [False] * 3 + [True, False, False]
    assert (found.is_drifted, found.log_kept, found.sampled_logp) == (None, None, None)


def test_every_token_of_a_conversation_that_drifted_is_marked():
    found = known([rollout(), replace(rollout(1), notes={"drift": 1.0})], [0.0] * 6)
    assert found.is_drifted is not None
    assert found.is_drifted.tolist() == [False] * 3 + [True] * 3


def test_what_was_kept_is_a_logarithm_and_never_above_zero():
    cut = replace(rollout(1), kept_mass=(None, None, 0.5, 1.0000001, None, 1.0))
    found = known([rollout(), cut], [0.0] * 6)
    assert found.log_kept is not None
    assert found.log_kept.tolist() == pytest.approx([0.0] * 3 + [-0.6931472, 0.0, 0.0])


def test_the_worst_tokens_are_found_where_they_stand():
    first = Branch(
        tokens=(5, 11), sources=(P, S), turns=(0, 0), logps=(None, -1.0), versions=(None, 2)
    )
    split = replace(rollout(1), earlier=(first,))
    inputs = known([rollout(), split], [-1.0, -2.0, -3.5, -3.0, -1.0, -2.0, -3.25])
    worst = worst_tokens(
        [rollout(), split],
        sampled_places([rollout(), split]),
        inputs,
        split_gap(inputs),
        text_of=str,
    )
    places = [(w.rollout, w.branch, w.position, w.text, w.gap) for w in worst]
    assert places == [
        ("4.0.a/1", 0, 1, "11", -2.0),
        ("4.0.a/0", 0, 5, "10", -0.5),
        ("4.0.a/1", 1, 5, "10", -0.25),
    ]
    assert [w.part for w in worst] == ["staleness", "engine", "engine"]
    assert [w.version for w in worst] == [2, 3, 3]


def test_without_a_gap_there_are_no_worst_tokens():
    inputs = known([rollout()], [-1.0, -2.0, -3.0])
    assert (
        worst_tokens(
            [rollout()], sampled_places([rollout()]), inputs, split_gap(inputs), text_of=str
        )
        == []
    )


def test_streams_of_another_length_are_refused():
    with pytest.raises(AssertionError, match="differ in length"):
        replace(rollout(), kept_mass=(0.5,))


def test_a_run_writes_its_worst_tokens_only_where_there_is_a_gap(tmp_path: Path):
    exact = train(tmp_path / "exact")
    assert not (exact.root / "parity").exists()
    assert exact.course("parity/engine_exact_fraction") == [1.0, 1.0]
    rough = train(tmp_path / "rough", HALF, f"{ACTOR}.shuffle=true")
    page = json.loads((rough.root / "parity" / "step_000001.json").read_text())
    worst = page["tokens"][0]
    assert (page["step"], len(page["tokens"]), worst["part"]) == (1, 10, "engine")
    assert abs(worst["gap"]) == pytest.approx(rough.course("parity/max_gap")[0])
    found = {
        f"{r.rollout.group}/{r.rollout.sample}": r.rollout
        for r in read_rollouts(rough.root / "rollouts" / "step_000001.parquet")
    }
    for token in page["tokens"]:
        drawn = found[token["rollout"]]
        assert drawn.tokens[token["position"]] == token["token"]
        assert drawn.logps[token["position"]] == pytest.approx(token["sampler"])
        assert drawn.sources[token["position"]] == S
    assert rough.course("parity/engine_max") == pytest.approx(rough.course("parity/max_gap"))
    assert rough.course("parity/engine_share") == [1.0, 1.0]


def test_what_an_update_measured_is_put_back_in_order_when_it_shuffles(tmp_path: Path):
    found = {}
    for shuffle in ("false", "true"):
        run = prepare(tmp_path / shuffle, HALF, f"{ACTOR}.shuffle={shuffle}")
        run.limit(1)
        groups = generate_and_score(run, 1).groups
        batch = prepare_batch(run.learning, groups)
        credited = group_advantages(run.learning, batch, groups, {}, kl_coef=0.0)
        logp = update_roles(run.learning, credited.batch, run.progress).trainer_logp
        assert logp is not None
        gap = (logp - batch.streams["rollout_logp"])[batch.layout.mask]
        assert float(gap.abs().max()) < 0.2
        found[shuffle] = logp
        close(run)
    assert torch.allclose(found["true"], found["false"], atol=0.05)
    assert not torch.equal(found["true"], torch.zeros_like(found["true"]))


def test_probability_that_was_ruled_out_is_measured_and_kept_in_the_files(tmp_path: Path):
    done = train(tmp_path, TOP_P)
    assert done.course("parity/max_gap") == [0.0, 0.0]
    assert done.course("parity/transform_share") == [1.0, 1.0]
    largest = done.course("parity/transform_max")
    assert all(
        0 < mean <= most < 0.2232
        for mean, most in zip(done.course("parity/transform_mean"), largest, strict=True)
    )
    assert done.course("parity/transform_kl") == done.course("parity/transform_mean")
    for recorded in read_rollouts(done.root / "rollouts" / "step_000001.parquet"):
        made = recorded.rollout
        assert [m is None for m in made.kept_mass] == [s != S for s in made.sources]
        assert all(0.8 <= m <= 1.0001 for m in made.kept_mass if m is not None)


def test_without_a_transform_files_and_digests_know_nothing_of_it(tmp_path: Path):
    done = train(tmp_path)
    assert done.course("parity/transform_max") == []
    rollouts = read_rollouts(done.root / "rollouts" / "step_000001.parquet")
    assert {r.rollout.kept_mass for r in rollouts} == {()}
