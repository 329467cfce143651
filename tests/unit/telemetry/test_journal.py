"""Rollouts, scores and calls come back from the journal to the last bit."""

import math
from binascii import b2a_base64
from dataclasses import fields, replace
from pathlib import Path

import pytest

from luyen.base.records import (
    Branch,
    CallStatus,
    ExpertRoutes,
    GroupId,
    Rollout,
    Score,
    Source,
    StopReason,
    ToolCall,
)
from luyen.telemetry.journal import DamagedJournal, WorkJournal, WorkJournals, _group_key
from luyen.telemetry.rollout_codec import (
    PackedStreams,
    rollout_of,
    rollout_tree,
    stream_bytes,
    streams_of,
)

CALL = ToolCall(
    turn=0,
    name="add",
    arguments={"a": 1, "b": [2.5, None]},
    status=CallStatus.OK,
    result="half a pair: \ud83d",
    reward=0.1,
    seconds=0.25,
    attempts=2,
)
BRANCH = Branch(
    tokens=(1, 2),
    sources=(Source.PROMPT, Source.SAMPLED),
    turns=(0, 0),
    logps=(None, -0.1),
    versions=(None, 3),
)
ROLLOUT = Rollout(
    group=GroupId(step=3, draw=1, uid="ab"),
    sample=2,
    tokens=(5, 6, 7, 8),
    sources=(Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.TEMPLATE),
    turns=(0, 0, 1, 1),
    logps=(None, -1 / 3, None, None),
    versions=(None, 7, None, None),
    stop=StopReason.TOOL_BUDGET,
    text="Tôi \ud83d",
    score=Score(
        name="reward",
        value=1 / 3,
        parts=(Score(name="b", value=None, error="no"),),
        by_turn=((0, 0.1),),
    ),
    calls=(CALL,),
    messages=({"role": "assistant", "content": "x"},),
    earlier=(BRANCH,),
    given=((0, 0.1), (1, math.inf)),
    notes={"drift": 0.0, "seconds": 1e-300},
)


@pytest.fixture
def journal(tmp_path: Path):
    return lambda: WorkJournal(tmp_path / "journal", run_id="run-1")


def test_a_rollout_comes_back_to_the_last_bit():
    assert rollout_of(rollout_tree(ROLLOUT)) == ROLLOUT


def test_kept_masses_come_back_too():
    held = replace(ROLLOUT, kept_mass=(None, 1 / 3, None, None))
    assert rollout_of(rollout_tree(held)) == held


def test_streams_are_packed_once_for_the_very_same_tuples():
    pack = PackedStreams()
    first = pack(ROLLOUT)
    assert first == stream_bytes(ROLLOUT)
    assert pack(replace(ROLLOUT, score=None)) is first
    other = replace(ROLLOUT, logps=(None, -0.5, None, None))
    assert pack(other) == stream_bytes(other) != first
    pack.forget()
    assert pack(ROLLOUT) is not first


def test_every_field_of_a_rollout_is_kept():
    tree = rollout_tree(ROLLOUT)
    streams = {field.name for field in fields(Branch)}
    assert set(tree) | streams == {field.name for field in fields(Rollout)} | {"streams"}
    routes = ExpertRoutes(layers=1, chosen=2, width=1, data=bytes([3, 0, 1, 2]))
    whole = replace(ROLLOUT, kept_mass=(None, 0.5, None, None), routes=routes)
    found = streams_of(stream_bytes(whole))
    assert set(found) == streams
    assert found["routes"] == routes


def test_rollouts_and_scores_are_found_by_their_purpose(journal):
    one = journal()
    assert one.begin(4, kind="work", basis=["x"]) == 0
    one.keep_rollout("rollout", ROLLOUT)
    score = ROLLOUT.score
    assert score is not None
    one.keep_scores("rollout", [ROLLOUT], [score])
    one.close()
    two = journal()
    assert two.begin(4, kind="work", basis=["x"]) == 2
    assert two.rollout("rollout", ROLLOUT.group, 2) == ROLLOUT
    assert two.rollout("greedy", ROLLOUT.group, 2) is None
    assert two.rollout("rollout", ROLLOUT.group, 1) is None
    assert two.scores("rollout", [ROLLOUT]) == [score]
    assert two.scores("greedy", [ROLLOUT]) is None
    two.close()


def test_scores_belong_to_what_was_judged(journal):
    one = journal()
    one.begin(4, kind="work", basis=["x"])
    one.keep_scores("rollout", [ROLLOUT], [Score(name="reward", value=1.0)])
    one.close()
    two = journal()
    two.begin(4, kind="work", basis=["x"])
    assert two.scores("rollout", [replace(ROLLOUT, tokens=(5, 6, 7, 9))]) is None
    assert two.scores("rollout", [ROLLOUT, ROLLOUT]) is None
    assert two.scores("rollout", [replace(ROLLOUT, given=((0, 0.2),))]) is None
    assert two.scores("rollout", [replace(ROLLOUT, calls=(replace(CALL, reward=0.2),))]) is None
    assert (
        two.scores("rollout", [replace(ROLLOUT, calls=(replace(CALL, seconds=9.0),))]) is not None
    )
    assert two.scores("rollout", [replace(ROLLOUT, score=None)]) is not None
    two.close()


def test_what_could_not_be_judged_is_judged_again(journal):
    one = journal()
    one.begin(4, kind="work", basis=["x"])
    one.keep_scores("rollout", [ROLLOUT], [Score(name="reward", value=None, error="no")])
    one.close()
    two = journal()
    assert two.begin(4, kind="work", basis=["x"]) == 0
    two.close()


def test_a_call_is_unknown_between_its_intent_and_its_result(journal):
    one = journal()
    one.begin(1, kind="work", basis=["x"])
    keys = [one.call_key([0, "rollout", index], "add", {"a": 1}) for index in range(3)]
    assert len({*keys, one.call_key([0, "rollout", 0], "add", {"a": 2})}) == 4
    for key in keys:
        one.intend(key, "add", {"a": 1})
    one.keep_call(keys[0], CALL, {"add/cost": 2.0})
    one.keep_call(keys[1], None, {})
    one.close()
    two = journal()
    two.begin(1, kind="work", basis=["x"])
    known = [two.call(key) for key in keys]
    assert [k.is_unknown for k in known] == [False, False, True]
    assert [k.call for k in known] == [CALL, None, None]
    assert known[0].metrics == {"add/cost": 2.0}
    assert not two.call("never").is_begun
    two.close()


def test_a_call_that_broke_and_was_begun_again_is_unknown(journal):
    one = journal()
    one.begin(1, kind="work", basis=["x"])
    keys = [one.call_key([index], "add", {}) for index in range(2)]
    for key, came in zip(keys, (None, CALL), strict=True):
        one.intend(key, "add", {})
        one.keep_call(key, came, {})
        one.intend(key, "add", {})
    one.close()
    two = journal()
    two.begin(1, kind="work", basis=["x"])
    assert [two.call(key).is_unknown for key in keys] == [True, False]
    assert two.call(keys[1]).call == CALL
    two.close()


def test_the_work_of_finished_steps_is_forgotten(journal, tmp_path: Path):
    one = journal()
    for step in (1, 2, 3):
        one.begin(step, kind="work", basis=[step])
        one.begin(step, kind="validation", basis=[step])
    one.close()
    WorkJournals(tmp_path / "journal", run_id="run-1").forget(2)
    names = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert names == ["step_000003.validation.jsonl", "step_000003.work.jsonl"]


def test_keys_of_two_validations_differ_and_last(journal):
    one = journal()
    keys: list[str] = []
    for step in (2, 4, 2):
        one.begin(step, kind="validation", basis=[step])
        keys.append(one.call_key([0, "validation", 0], "add", {"a": 1}))
    one.close()
    assert keys[0] == keys[2] != keys[1]


def test_keys_of_two_runs_differ(tmp_path: Path):
    keys = {WorkJournal(tmp_path, run_id=run).call_key([0], "add", {}) for run in ("a", "b")}
    assert len(keys) == 2


def _forged(journal, kind: str, key: str, body) -> WorkJournal:
    """A journal with a record that fits its checksum and not its kind."""
    one = journal()
    one.begin(4, kind="work", basis=["x"])
    one._file.append(kind, key, body)
    one.close()
    two = journal()
    two.begin(4, kind="work", basis=["x"])
    return two


ODD_ROLLOUTS = [
    {},
    {"group": 1},
    {**rollout_tree(ROLLOUT), "streams": "AAAA"},
    {**rollout_tree(ROLLOUT), "streams": b2a_base64(b"\xff" * 64).decode()},
    {**rollout_tree(ROLLOUT), "streams": 7},
    {**rollout_tree(ROLLOUT), "stop": "never"},
    {**rollout_tree(ROLLOUT), "calls": [{"name": 1}]},
    {**rollout_tree(ROLLOUT), "earlier": [5]},
    {**rollout_tree(ROLLOUT), "score": [1]},
]


@pytest.mark.parametrize("body", ODD_ROLLOUTS)
def test_a_forged_rollout_is_generated_again(journal, body):
    forged = _forged(journal, "rollout", f"rollout {ROLLOUT.group}/2", body)
    with pytest.warns(DamagedJournal, match="its work is done again"):
        assert forged.rollout("rollout", ROLLOUT.group, 2) is None


@pytest.mark.parametrize("scores", [[], [{}], [1], "x", [{"name": "a", "value": "x"}]])
@pytest.mark.filterwarnings("ignore::luyen.telemetry.journal.DamagedJournal")
def test_forged_scores_are_computed_again(journal, scores):
    key = _group_key("rollout", [ROLLOUT])
    forged = _forged(journal, "scores", key, {"scores": scores})
    assert forged.scores("rollout", [ROLLOUT]) is None


@pytest.mark.parametrize("call", [{}, 5, {"status": "ok"}, {"status": "eaten", "name": "a"}])
@pytest.mark.filterwarnings("ignore::luyen.telemetry.journal.DamagedJournal")
def test_of_a_forged_call_it_is_unknown_whether_it_was_made(journal, call):
    forged = _forged(journal, "result", "k", {"call": call, "metrics": {}})
    assert forged.call("k").call is None


def test_a_record_without_kind_key_or_body_counts_as_damaged(journal):
    with pytest.warns(DamagedJournal, match="1 records are damaged"):
        assert _forged(journal, "rollout", "a", 5).rollout("rollout", ROLLOUT.group, 2) is None
