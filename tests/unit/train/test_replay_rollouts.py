"""One rollout drawn again with the weights that drew it."""

from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Source
from luyen.data.render import Renderer
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.regenerate import RegeneratedRollout, find_rollout
from luyen.studio.replay.replay import replay_rollout
from luyen.telemetry.rollout_files import RecordedRollout
from tests.runs import CHATTY, Ran, train
from tests.unit.train.replays import SANITY, SORTS, STEPS, always_anew, edit_rows
from tests.unit.train.test_replay import nobody

STEP = 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("plain"), STEPS)


def rollouts(ran: Ran) -> list[Rollout]:
    return ReplayRecord(ran.root).step(STEP).rollouts


def again(ran: Ran, rollout: Rollout) -> RegeneratedRollout:
    return replay_rollout(ReplayRecord(ran.root), STEP, f"{rollout.group}/{rollout.sample}", nobody)


def sampled(rollout: Rollout) -> int:
    return sum(b.sources.count(Source.SAMPLED) for b in rollout.branches)


@pytest.mark.parametrize("sort", ["grpo", "critic", "lora", "top-p", "epochs"])
def test_an_answer_comes_again_to_the_last_bit(sort: str, tmp_path: Path):
    ran = train(tmp_path, STEPS, *SORTS[sort])
    for rollout in rollouts(ran)[:2]:
        found = again(ran, rollout)
        assert (found.difference, found.turns) == (None, 1)
        assert len(found.tokens) == sampled(rollout)


def test_a_conversation_comes_again_and_its_tools_are_gone(tmp_path: Path):
    tools = tmp_path / "tools.py"
    tools.write_text((Path(__file__).parents[2] / "chatty_tools.py").read_text())
    place = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
    ran = train(tmp_path, STEPS, *CHATTY, f"{place}={tools}")
    tools.unlink()
    longest = max(rollouts(ran), key=lambda rollout: rollout.num_turns)
    assert longest.num_turns > 2
    found = again(ran, longest)
    assert (found.difference, found.turns) == (None, longest.num_turns)
    assert len(found.tokens) == sampled(longest)


def test_a_conversation_that_a_template_split_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Renderer, "extend", always_anew)
    ran = train(tmp_path, STEPS, *CHATTY, SANITY)
    monkeypatch.undo()
    split = max(rollouts(ran), key=lambda rollout: len(rollout.branches))
    assert len(split.branches) > 2
    found = again(ran, split)
    assert (found.difference, found.turns) == (None, split.num_turns)
    assert {token.branch for token in found.tokens} == set(range(len(split.branches)))


def test_the_first_token_that_differs_is_named_with_both_log_probs(tmp_path: Path):
    ran = train(tmp_path, STEPS)
    place = rollouts(ran)[0].prompt_length + 1

    def other(rows: list[RecordedRollout]) -> list[RecordedRollout]:
        first = rows[0].rollout
        tokens = list(first.tokens)
        tokens[place] = (tokens[place] + 1) % 50
        return [replace(rows[0], rollout=replace(first, tokens=tuple(tokens))), *rows[1:]]

    edit_rows(ran.root, STEP, other)
    edited = rollouts(ran)[0]
    found = again(ran, edited)
    assert not found.is_equal
    difference = found.difference
    assert difference is not None
    assert difference.position == place
    assert difference.recorded is not None
    assert difference.regenerated is not None
    assert difference.recorded.id == edited.tokens[place]
    assert difference.regenerated.id != difference.recorded.id
    assert difference.recorded.logp == edited.logps[place]


def test_a_beginning_that_is_unique_is_enough(plain: Ran):
    recorded = ReplayRecord(plain.root).step(STEP)
    rollout = recorded.rollouts[0]
    name = f"{rollout.group}/{rollout.sample}"
    assert find_rollout(recorded, name) is not None
    assert find_rollout(recorded, name).key == rollout.key
    last = recorded.rollouts[-1]
    assert find_rollout(recorded, f"{last.group}/{last.sample}").key == last.key
    with pytest.raises(UserError, match="several begin so"):
        find_rollout(recorded, str(rollout.group))
    with pytest.raises(UserError, match="has no such rollout"):
        find_rollout(recorded, "9.9")


def test_a_rollout_that_several_versions_drew_is_refused(tmp_path: Path):
    ran = train(tmp_path, STEPS)

    def stale(rows: list[RecordedRollout]) -> list[RecordedRollout]:
        first = rows[0].rollout
        versions = tuple(None if v is None else i % 2 for i, v in enumerate(first.versions))
        return [replace(rows[0], rollout=replace(first, versions=versions)), *rows[1:]]

    edit_rows(ran.root, STEP, stale)
    with pytest.raises(UserError, match="versions 0, 1 of the weights drew it"):
        again(ran, rollouts(ran)[0])
