"""A recorded step done again from files: the same to the last bit, or where it parts."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore, DamagedCheckpoint
from luyen.data.render import Renderer
from luyen.studio.replay.learner import StepCheck
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.replay import replay_step
from luyen.studio.replay.results import ReplayedStep
from luyen.telemetry.metrics import metrics_line, read_metrics
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts
from luyen.train.record import Recorder
from tests.runs import ACTOR, Ran, train
from tests.unit.train.replays import SANITY, SORTS, STEPS, always_anew, edit_config, edit_rows

LEARNED = ("prompts", "rollouts", "rewards", "advantages", "gradients", "weights")


def nobody(done: int, total: int, checked: StepCheck | None) -> None:
    """Watches and says nothing."""


def replayed(root: Path, step: int) -> ReplayedStep:
    return replay_step(ReplayRecord(root), step, nobody)


def files_of(root: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of every file of a run."""
    return {
        path.relative_to(root).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("plain"), STEPS)


@pytest.fixture
def copy(plain: Ran, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain.root, tmp_path / "copy"))


@pytest.mark.parametrize("sort", SORTS)
def test_every_step_of_every_sort_of_run_comes_again_to_the_last_bit(sort: str, tmp_path: Path):
    ran = train(tmp_path, STEPS, *SORTS[sort])
    found = replayed(ran.root, 3)
    assert [(one.step, one.equal) for one in found.checks] == [(n, LEARNED) for n in (1, 2, 3)]
    assert found.is_equal
    assert {"advantage/mean_abs", "group/variance"} <= found.numbers.keys()
    recorded = {name: n.before for name, n in found.numbers.items() if "/lr" not in name}
    assert recorded["actor/grad_norm"] == ran.metrics[2]["actor/grad_norm"]
    assert all(value is not None for value in recorded.values())
    assert found.notes == ()


def test_groups_that_were_left_out_are_left_out_again(tmp_path: Path):
    ran = train(tmp_path, STEPS, *SORTS["filter"])
    rows = [row for step in (1, 2, 3) for row in ReplayRecord(ran.root).step(step).rows]
    assert 0 < sum(row.advantages is None for row in rows) < len(rows)
    assert replayed(ran.root, 3).is_equal


def test_conversations_that_a_template_split_are_learned_from_by_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Renderer, "extend", always_anew)
    ran = train(tmp_path, STEPS, *SORTS["tools"], SANITY)
    monkeypatch.undo()
    rollouts = ReplayRecord(ran.root).step(3).rollouts
    assert max(len(rollout.branches) for rollout in rollouts) > 2
    assert replayed(ran.root, 3).is_equal


def test_nothing_of_the_run_is_changed_and_no_reward_is_read(tmp_path: Path):
    reward = tmp_path / "mine.py"
    reward.write_text((Path(__file__).parents[2] / "shares_reward.py").read_text())
    ran = train(tmp_path, STEPS, f"reward.custom_reward_function.path={reward}")
    reward.unlink()
    before = files_of(ran.root)
    assert replayed(ran.root, 3).is_equal
    assert files_of(ran.root) == before


def test_a_checkpoint_saves_the_steps_before_it(tmp_path: Path):
    ran = train(tmp_path, STEPS, "trainer.save_freq=1", *SORTS["critic"])
    found = replayed(ran.root, 3)
    assert (found.start, len(found.checks)) == ("checkpoint step_000002", 1)
    assert found.is_equal
    shutil.rmtree(ran.root / "checkpoints" / "step_000002")
    found = replayed(ran.root, 3)
    assert (found.start, len(found.checks)) == ("checkpoint step_000001", 2)
    assert found.is_equal


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path):
    ran = train(tmp_path, STEPS, "trainer.save_freq=1")
    newest = CheckpointStore(ran.root / "checkpoints").path(2)
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.warns(DamagedCheckpoint):
        found = replayed(ran.root, 3)
    assert (found.start, found.is_equal) == ("checkpoint step_000001", True)


def test_a_checkpoint_of_another_course_is_passed_over(tmp_path: Path):
    ran = train(tmp_path / "a", STEPS, "trainer.save_freq=1")
    other = train(tmp_path / "b", STEPS, "trainer.save_freq=1", f"{ACTOR}.optim.lr=2.0e-3")
    place = ran.root / "checkpoints" / "step_000002"
    shutil.rmtree(place)
    shutil.copytree(other.root / "checkpoints" / "step_000002", place)
    found = replayed(ran.root, 3)
    assert (found.start, found.is_equal) == ("checkpoint step_000001", True)


def test_a_resumed_run_is_replayed_over_the_point_where_it_was_stopped(tmp_path: Path):
    train(tmp_path, "trainer.total_training_steps=2")
    shutil.rmtree(train(tmp_path, STEPS).root / "checkpoints")
    (root,) = tmp_path.glob("*/*")
    found = replayed(root, 3)
    assert (found.start, found.is_equal) == ("the beginning", True)


def test_progress_counts_the_steps_as_they_are_done(plain: Ran):
    heard: list[tuple[int, int, int | None]] = []

    def watch(done: int, total: int, checked: StepCheck | None) -> None:
        heard.append((done, total, None if checked is None else checked.step))

    replay_step(ReplayRecord(plain.root), 3, watch)
    assert heard == [(0, 3, None), (1, 3, 1), (2, 3, 2), (3, 3, 3)]


def test_an_edited_score_parts_at_the_rewards(copy: Path):
    def better(rows: list[RecordedRollout]) -> list[RecordedRollout]:
        first = rows[0].rollout
        assert first.score is not None
        score = replace(first.score, value=(first.score.value or 0.0) + 1.0)
        return [replace(rows[0], rollout=replace(first, score=score)), *rows[1:]]

    edit_rows(copy, 2, better)
    found = replayed(copy, 3)
    assert found.parting is not None
    assert (found.parting.step, found.parting.parted_at) == (2, "rewards")
    assert found.parting.equal == ("prompts", "rollouts")
    assert "advantages" in found.parting.unequal
    assert not found.is_equal
    assert "not those of the run" in found.notes[0]


def test_another_learning_rate_parts_at_the_weights(copy: Path):
    edit_config(copy, f"{ACTOR}.optim.lr", 2.0e-3)
    found = replayed(copy, 2)
    assert found.parting is not None
    assert (found.parting.step, found.parting.parted_at) == (1, "weights")
    assert not found.numbers["actor/entropy"].is_equal


def test_an_edited_metric_is_not_equal(copy: Path):
    edited = [
        metrics_line(s.step, s.values | ({"actor/entropy": 0.5} if s.step == 3 else {}))
        for s in read_metrics(copy / "metrics.jsonl")
    ]
    (copy / "metrics.jsonl").write_text("".join(edited))
    found = replayed(copy, 3)
    assert found.parting is None
    assert (found.numbers["actor/entropy"].before, found.is_equal) == (0.5, False)


def test_without_metrics_digests_decide_and_a_note_says_so(copy: Path):
    (copy / "metrics.jsonl").unlink()
    found = replayed(copy, 1)
    assert found.is_equal
    assert "compared with nothing" in found.notes[0]


def test_what_cannot_be_done_is_refused_with_the_reason(copy: Path):
    with pytest.raises(UserError, match="it did 1 to 3"):
        replayed(copy, 4)
    with pytest.raises(UserError, match="no such step"):
        replayed(copy, 0)
    (copy / "rollouts" / "step_000001.parquet").unlink()
    with pytest.raises(UserError, match="rollouts of step 1 are needed"):
        replayed(copy, 3)
    shutil.copy(copy / "rollouts/step_000002.parquet", copy / "rollouts/step_000001.parquet")
    with pytest.raises(UserError, match="rollouts of step 2"):
        replayed(copy, 3)
    (copy / "digests.jsonl").unlink()
    with pytest.raises(UserError, match="digests"):
        replayed(copy, 3)


def test_a_record_without_greedy_rewards_is_refused(tmp_path: Path):
    ran = train(tmp_path, STEPS, *SORTS["remax"])
    edit_rows(ran.root, 1, lambda rows: [replace(row, baseline=None) for row in rows])
    with pytest.raises(UserError, match="greedy rewards"):
        replayed(ran.root, 1)


def test_a_run_that_went_on_from_another_needs_its_checkpoint(tmp_path: Path):
    first = train(tmp_path / "a", "trainer.total_training_steps=1")
    start = first.root / "checkpoints" / "step_000001"
    words = ("trainer.resume_mode=path", f"trainer.resume_from_path={start}")
    ran = train(tmp_path / "b", STEPS, *words)
    shutil.rmtree(ran.root / "checkpoints")
    found = replayed(ran.root, 3)
    assert (found.start, found.is_equal) == ("checkpoint step_000001", True)
    shutil.rmtree(start)
    with pytest.raises(UserError, match="no checkpoint before step 3 is left"):
        replayed(ran.root, 3)


def test_a_greedy_answer_that_broke_is_not_taken_for_the_sample_at_its_address(
    plain: Ran, tmp_path: Path
):
    row = ReplayRecord(plain.root).step(1).rows[0]
    sound = row.rollout
    broken = replace(
        sound, tokens=(), sources=(), turns=(), logps=(), versions=(), fault="no server", score=None
    )
    writer = Recorder(RunDirectory(tmp_path), *[None] * 3)  # type: ignore[arg-type]
    used = {sound.key: [row.advantages or ()]}
    writer.rollouts(1, [sound, broken], lambda: used, {str(sound.group): 0.25})
    writer.flush()
    rows = read_rollouts(RunDirectory(tmp_path).rollouts(1))
    assert [one.advantages is None for one in rows] == [False, True]
    assert {one.baseline for one in rows} == {0.25}
