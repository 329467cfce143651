"""A rollout that a template split into branches is trained as the one rollout it is."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.records import Branch, Rollout, Score, Source
from luyen.config.catalog import ADV_ESTIMATORS
from luyen.config.schema.algorithm import RolloutCorrectionConfig
from luyen.engine.batch import MicroBatching, PackedBatch
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts, write_rollouts
from luyen.train.advantages import AdvantageConfig, BatchAdvantages, compute_advantages
from luyen.train.batch import pack_groups
from luyen.train.record import advantages_by_rollout
from luyen.train.update import mini_batches
from tests.unit.engine.steps import actor
from tests.unit.train.conversations import groups, talk

SHARE = Score(name="calls", value=0.5, weight=2.0, by_turn=((0, 0.5),))
ROLLOUTS = (
    talk("pp00tt11t2", score=Score(name="reward", value=1.5, parts=(SHARE,))),
    talk("pp00t1", score=0.25),
    talk("pp0", score=-1.0),
    talk("p00", score=1.0, draw=1),
    talk("p0t1", score=0.0, draw=1),
)
BY_MASKED_POSITION = "optimal_token_baseline"
"""Its positions count masked tokens, of which a split rollout has more."""


def split(rollout: Rollout, turn: int) -> Rollout:
    """The same rollout in two branches: the second repeats the first as history, from `turn` on."""
    places = [i for i, t in enumerate(rollout.turns) if t >= turn]
    cut = next(i for i in places if rollout.sources[i] == Source.SAMPLED)
    first = Branch(
        tokens=rollout.tokens[:cut],
        sources=rollout.sources[:cut],
        turns=rollout.turns[:cut],
        logps=rollout.logps[:cut],
        versions=rollout.versions[:cut],
    )
    return replace(
        rollout,
        sources=(Source.TEMPLATE,) * cut + rollout.sources[cut:],
        logps=(None,) * cut + rollout.logps[cut:],
        versions=(None,) * cut + rollout.versions[cut:],
        earlier=(*rollout.earlier, first),
    )


SPLIT = (split(ROLLOUTS[0], 1), *ROLLOUTS[1:4], split(ROLLOUTS[4], 1))


def packed(rollouts: tuple[Rollout, ...]) -> PackedBatch:
    """The batch of a step, with every stream that an estimator may ask for."""
    batch = pack_groups(groups(*rollouts))
    mask = batch.layout.mask
    numbers = torch.linspace(-1.0, 1.0, int(mask.sum()))
    streams = {"values": numbers, "old_logp": numbers.abs() - 2.0, "sum_pi_squared": numbers**2}
    streams["ref_logp"] = numbers - 2.0
    return batch.with_streams(**{name: batch.scatter(x) for name, x in streams.items()})


def credited(
    rollouts: tuple[Rollout, ...], name: str, correction: RolloutCorrectionConfig | None = None
) -> BatchAdvantages:
    facts = ADV_ESTIMATORS[name]
    rules = AdvantageConfig(
        estimator=name,
        hparams={},
        is_group_relative=facts.group_relative,
        kl_kind=None,
        correction=correction,
    )
    outcomes = torch.tensor([r.score.value for r in rollouts if r.score is not None])
    return compute_advantages(
        packed(rollouts),
        rules,
        kl_coef=0.0,
        baselines=outcomes / 2,
        components={"right": outcomes, "brief": -outcomes.square()},
    )


def on_sampled(found: BatchAdvantages, name: str) -> Tensor:
    return found.batch.streams[name][found.batch.layout.mask]


def test_each_branch_is_a_sequence_and_each_rollout_is_counted_once():
    batch = pack_groups(groups(*SPLIT))
    assert batch.lengths == (6, 10, 6, 3, 3, 3, 4)
    assert batch.branch_of == (0, 0, 1, 2, 3, 4, 4)
    assert batch.layout.groups.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.rollouts.offsets.tolist() == [0, 16, 22, 25, 28, 35]
    assert batch.rollouts.groups.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(batch.rollouts.mask, batch.layout.mask)
    whole = pack_groups(groups(*ROLLOUTS))
    assert whole.rollouts is whole.layout
    assert torch.equal(
        batch.streams["rollout_logp"][batch.layout.mask],
        whole.streams["rollout_logp"][whole.layout.mask],
    )


@pytest.mark.parametrize("name", [n for n in ADV_ESTIMATORS if n != BY_MASKED_POSITION])
def test_a_split_changes_no_advantage(name: str):
    one, two = credited(ROLLOUTS, name), credited(SPLIT, name)
    assert on_sampled(one, "advantages").any()
    for stream in ("advantages", "returns"):
        torch.testing.assert_close(on_sampled(one, stream), on_sampled(two, stream))
    assert two.metrics == pytest.approx(one.metrics)


def test_a_correction_weighs_whole_rollouts():
    rule = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=2.0)
    one, two = credited(ROLLOUTS, "rloo", rule), credited(SPLIT, "rloo", rule)
    torch.testing.assert_close(on_sampled(one, "is_weights"), on_sampled(two, "is_weights"))
    assert len(set(on_sampled(two, "is_weights")[:5].tolist())) == 1
    assert two.metrics == pytest.approx(one.metrics)


def gradient(batch: PackedBatch, objective: Objective, passes: MicroBatching) -> Tensor:
    engine = actor(passes)
    stepped: list[Tensor] = []

    def keep(lr: float) -> object:
        del lr
        masters = engine.optimizer.masters
        stepped.append(torch.cat([m.grad.flatten() for m in masters if m.grad is not None]))
        return None

    engine.optimizer.step = keep  # type: ignore[method-assign]
    engine.update(batch, objective, lr=0.0, seed=0)
    return stepped[0]


@pytest.mark.parametrize(
    "passes", [MicroBatching(sequences=1), MicroBatching(max_tokens=100)], ids=repr
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_split_changes_no_gradient(mode: str, passes: MicroBatching):
    objective = Objective(loss="vanilla", aggregation=mode)
    one = gradient(credited(ROLLOUTS, "grpo").batch, objective, MicroBatching(max_tokens=100))
    two = gradient(credited(SPLIT, "grpo").batch, objective, passes)
    assert one.norm() > 0
    assert (one - two).norm() < 1e-5 * one.norm()


def test_the_gradients_of_branches_add_up():
    batch = credited(SPLIT, "grpo").batch
    objective = Objective(loss="reinforce", aggregation="seq-mean-token-mean")
    place = torch.arange(batch.tokens.numel())
    parts = [
        batch.with_streams(advantages=batch.streams["advantages"].where(place < 6, 0.0)),
        batch.with_streams(advantages=batch.streams["advantages"].where(place >= 6, 0.0)),
    ]
    whole = gradient(batch, objective, MicroBatching(sequences=2))
    first, second = (gradient(part, objective, MicroBatching(sequences=3)) for part in parts)
    assert first.norm() > 0
    assert (first + second - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("shuffle", [False, True])
def test_mini_batches_keep_the_branches_of_a_rollout_together(shuffle: bool):
    batch = pack_groups(groups(*SPLIT))
    parts = list(mini_batches(batch, groups=1, epochs=1, shuffle=shuffle, seed=3, step=1))
    assert sorted(part.rollouts.num_sequences for part in parts) == [2, 3]
    assert sorted(len(part.lengths) for part in parts) == [3, 4]


def test_advantages_of_every_branch_are_recorded(tmp_path):
    found = credited(SPLIT, "grpo")
    rollouts = [rollout for group in groups(*SPLIT) for rollout in group.rollouts]
    by_rollout = advantages_by_rollout(rollouts, found.batch)
    first, second = by_rollout[rollouts[0].key]
    stream = found.batch.streams["advantages"].tolist()
    assert first == (None, None, stream[2], stream[3], None, None)
    assert second == (*(None,) * 6, stream[12], stream[13], None, stream[15])
    kept = [
        RecordedRollout(rollout=r, advantages=rows[-1], earlier=tuple(rows[:-1]))
        for r, rows in ((r, by_rollout[r.key]) for r in rollouts)
    ]
    write_rollouts(tmp_path / "a.parquet", kept)
    assert read_rollouts(tmp_path / "a.parquet") == kept


def test_other_rollouts_than_those_of_the_batch_are_refused():
    found = credited(SPLIT, "grpo")
    with pytest.raises(AssertionError, match="other rollouts"):
        advantages_by_rollout(ROLLOUTS, found.batch)
