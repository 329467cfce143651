"""A recorded step under changed keys: what moves, token by token, and what cannot be changed."""

from pathlib import Path

import pytest
import torch

from luyen.base.errors import UserError
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.replay import vary_step
from luyen.studio.replay.results import StepVariation
from tests.runs import ACTOR, ROLLOUT, Ran, train
from tests.unit.train.replays import SORTS, STEPS, TWO
from tests.unit.train.test_replay import nobody


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("plain"), STEPS)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run whose second visit of a token finds a ratio that is not 1."""
    return train(tmp_path_factory.mktemp("twice"), STEPS, *TWO, f"{ACTOR}.optim.lr=1.0e-2")


def varied(ran: Ran, *words: str, step: int = 2) -> StepVariation:
    return vary_step(ReplayRecord(ran.root), step, words, nobody)


def test_a_narrower_clip_holds_more_tokens(twice: Ran):
    found = varied(twice, f"{ACTOR}.clip_ratio=0.02")
    assert found.is_equal
    assert found.keys == {f"{ACTOR}.clip_ratio": (0.2, 0.02)}
    assert found.stages == ("gradients", "weights")
    share = found.numbers["actor/pg_clipfrac"]
    assert (share.before or 0.0) < (share.after or 0.0)
    moved = [token for token in found.tokens if token.before != token.after]
    assert {token.visit for token in moved} >= {1}
    newly = [token for token in moved if token.after.is_clipped and not token.before.is_clipped]
    assert newly
    assert all(token.after.gradient == 0.0 for token in newly)
    assert all(a.moved >= b.moved for a, b in zip(found.tokens, found.tokens[1:], strict=False))


def test_flags_ratios_and_losses_add_up_to_what_the_step_measured(twice: Ran):
    found = varied(twice, f"{ACTOR}.clip_ratio=0.02")
    for side in ("before", "after"):
        views = [getattr(token, side) for token in found.tokens]
        measured = {name: getattr(number, side) for name, number in found.numbers.items()}
        # Every optimizer step holds half of the groups: metrics are means over four of them.
        flagged = sum(view.is_clipped for view in views) / len(views)
        held = measured["actor/pg_clipfrac"] + measured["actor/pg_clipfrac_lower"]
        assert flagged == pytest.approx(held, abs=0.02)
        total = sum(view.share for view in views) / 4
        assert total == pytest.approx(measured["actor/pg_loss"], abs=1e-6)
        first = [view for token, view in zip(found.tokens, views, strict=True) if not token.visit]
        assert all(0.3 < view.ratio < 3.0 for view in first)
        mean = sum(abs(view.advantage) for view in first) / len(first)
        assert mean == pytest.approx(measured["advantage/mean_abs"])


def test_another_aggregation_changes_weights_and_no_loss(plain: Ran):
    found = varied(plain, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum")
    assert "advantages" not in found.stages
    assert found.numbers["actor/pg_loss"].before != found.numbers["actor/pg_loss"].after
    changed = [token for token in found.tokens if token.before != token.after]
    assert changed
    assert all(t.before.loss == t.after.loss for t in changed)
    assert all(t.before.weight != t.after.weight for t in changed)
    gradients = torch.tensor([t.after.gradient for t in changed])
    expected = torch.tensor([-t.after.advantage * t.after.weight for t in changed])
    assert torch.allclose(gradients, expected)


def test_another_estimator_changes_advantages(plain: Ran):
    found = varied(plain, "algorithm.adv_estimator=rloo")
    assert found.stages == ("advantages", "gradients", "weights")
    assert not found.numbers["advantage/mean_abs"].is_equal
    assert any(t.before.advantage != t.after.advantage for t in found.tokens)


def test_a_term_that_the_run_did_not_have_can_be_added(plain: Ran):
    found = varied(plain, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5")
    assert found.numbers["actor/kl_loss"].before is None
    assert (found.numbers["actor/kl_loss"].after or 0.0) > 0.0


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        (f"{ACTOR}.optim.lr=2.0e-3", ("weights",)),
        (f"{ACTOR}.optim.weight_decay=0.5", ("weights",)),
        (f"{ACTOR}.optim.betas=[0.5, 0.999]", ("gradients", "weights")),
    ],
)
def test_keys_of_the_optimizer_act_although_its_state_is_the_runs(
    change: str, stages: tuple[str, ...], plain: Ran
):
    found = varied(plain, change)
    assert found.stages == stages
    assert found.numbers["actor/entropy"].is_equal


def test_more_visits_are_compared_as_far_as_both_go(plain: Ran):
    found = varied(plain, f"{ACTOR}.ppo_epochs=2")
    assert {token.visit for token in found.tokens} == {0}


def test_a_critic_keeps_its_weights_where_it_is_asked_and_rests_where_not(tmp_path: Path):
    ran = train(tmp_path, STEPS, *SORTS["critic"])
    found = varied(ran, "algorithm.lam=0.5")
    assert found.is_equal
    assert "advantages" in found.stages
    without = varied(ran, "algorithm.adv_estimator=rloo")
    assert without.numbers["critic/vf_loss"].after is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("data.train_batch_size=8", "are drawn already"),
        (f"{ROLLOUT}.temperature=0.5", "are drawn already"),
        (f"{ROLLOUT}.n=8", "are drawn already"),
        ("actor_rollout_ref.model.lora_rank=4", "has those of the run"),
        ("reward.on_fault=drop", "no reward is called"),
        ("algorithm.filter_groups.max_num_gen_batches=3", "are chosen already"),
        ("trainer.save_freq=7", "does not act"),
        ("trainer.seed=5", "belong to the run"),
        ("algorithm.adv_estimator=gae", "needs a critic"),
        ("algorithm.adv_estimator=remax", "the run generated none"),
        ("algorithm.adv_estimator=grop", "did you mean `grpo`"),
        (f"{ACTOR}.clip_ratio=-1", "clip_ratio"),
        (f"{ACTOR}.clip_ration=0.1", "did you mean"),
        (f"{ACTOR}.clip_ratio=0.2", "these very values"),
    ],
)
def test_what_cannot_act_on_a_recorded_step_is_refused_with_the_reason(
    change: str, reason: str, plain: Ran
):
    with pytest.raises(UserError, match=reason):
        varied(plain, change)
