"""The table of rollouts, one rollout, and its group."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlencode

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luyen.base.records import CallStatus, StopReason, ToolCall
from luyen.base.rundir import RunDirectory
from luyen.studio.screens.rollout_index import RolloutIndex
from luyen.studio.token_file import TokenNumbers, write_token_numbers
from luyen.telemetry.rollout_files import RecordedRollout, write_rollouts
from tests.unit.studio.run_files import rollout
from tests.unit.web.server import Client, serving, until

CONFIG = """\
trainer: {stage: rl, total_training_steps: 3}
actor_rollout_ref: {model: {path: 'builtin://arithmetic'}}
"""
HOSTILE = "<script>alert(1)</script>\u202e\x00\x1b[2J" + "x" * 1000


def changed(recorded: RecordedRollout, **facts: object) -> RecordedRollout:
    return replace(recorded, rollout=replace(recorded.rollout, **facts))


def step_rows(step: int) -> list[RecordedRollout]:
    """Two groups: one with rewards 0 and 1, one whose samples all get 1."""
    mixed = [
        rollout(step, draw=0, sample=i, reward=float(i), advantages=(None,) * 3 + (i - 0.5,) * 2)
        for i in (0, 1)
    ]
    alike = [
        rollout(step, draw=1, sample=i, reward=1.0, advantages=(None,) * 3 + (0.0,) * 2)
        for i in (0, 1)
    ]
    call = ToolCall(turn=0, name="sum", arguments={"a": 1}, status=CallStatus.OK, result="2",
                    seconds=0.5)  # fmt: skip
    mixed[0] = changed(mixed[0], calls=(call,), text=f"answer {step} {HOSTILE}")
    mixed[1] = replace(mixed[1], trainer_logps=(None,) * 3 + (-0.5, -0.5 + math.log(2)))
    broken = changed(rollout(step, draw=2), fault="ValueError: no\nmore", score=None,
                     stop=StopReason.FAULT)  # fmt: skip
    return [*mixed, *alike, replace(broken, advantages=None)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("runs")
    run = RunDirectory.create(root / "p" / "a", config=CONFIG, provenance={}, manifest={})
    for step in (1, 2, 3):
        write_rollouts(run.rollouts(step), step_rows(step), step=step)
    write_rollouts(
        run.rollouts(2, validation=True), [replace(rollout(0, reward=0.25), advantages=None)]
    )
    with serving(root) as found:
        yield found


def table(client: Client, **query: object) -> dict:
    words = urlencode(query)
    return client.get(f"/runs/{client.only_run()}/rollouts?{words}")


def places(page: dict) -> list[tuple[int, int]]:
    return [(row["step"], row["index"]) for row in page["rows"]]


def test_the_newest_rollouts_come_first_and_pages_follow_each_other(client: Client):
    first = table(client, limit=4)
    assert places(first) == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert (first["total_rows"], first["total_steps"], first["scanned_steps"]) == (15, 3, 3)
    assert (first["indexed_steps"], first["known_steps"]) == (3, 3)
    second = table(client, limit=4, cursor=first["cursor"])
    assert places(second) == [(3, 4), (2, 0), (2, 1), (2, 2)]
    rest = table(client, limit=200, cursor=second["cursor"])
    assert len(rest["rows"]) == 7
    assert rest["cursor"] is None


def test_a_row_says_what_the_rollout_was(client: Client):
    row = table(client, limit=1, order="asc")["rows"][0]
    assert (row["split"], row["step"], row["index"]) == ("train", 1, 0)
    assert (row["reward"], row["advantage"], row["tokens"], row["turns"]) == (0.0, -0.5, 5, 1)
    assert (row["stop"], row["fault"], row["tools"]) == ("answered", None, ["sum"])
    assert row["version"] == 0
    assert row["answer"] == f"answer 1 {HOSTILE}"[:200]
    assert row["prompt"]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"reward_min": 0.5}, 9),
        ({"reward_max": 0.5}, 3),
        ({"start": 2, "end": 2}, 5),
        ({"stop": "fault"}, 3),
        ({"stop": "nothing of it"}, 0),
        ({"fault": "any"}, 3),
        ({"fault": "ValueError: no"}, 3),
        ({"tool": "sum"}, 3),
        ({"tool": "other"}, 0),
        ({"tool": "sum", "reward_min": 0.5}, 0),
        ({"text": "ANSWER 2"}, 1),
        ({"text": "<script>", "start": 3}, 1),
        ({"split": "validation"}, 1),
    ],
)
def test_filters_by_column_and_text(client: Client, query: dict[str, object], count: int):
    page = table(client, **query)
    assert len(page["rows"]) == count
    assert page["total_rows"] in (count, None)


def test_rows_are_sorted_by_a_column_with_pages(client: Client):
    found = table(client, sort="reward", order="asc", limit=4)
    assert [row["reward"] for row in found["rows"]] == [0.0, 0.0, 0.0, 1.0]
    more = table(client, sort="reward", order="asc", limit=100, cursor=found["cursor"])
    assert len(more["rows"]) == 8  # a rollout without a reward has no place in the order
    best = table(client, sort="advantage", limit=3)
    assert {row["advantage"] for row in best["rows"]} == {0.5}


def test_choices_are_those_of_the_run(client: Client):
    choices = table(client)["choices"]
    assert set(choices["stop"]) == {"answered", "fault"}
    assert choices["fault"] == ["ValueError: no"]
    assert choices["tool"] == ["sum"]


def test_one_rollout_has_every_token_and_their_numbers(client: Client):
    page = client.get(f"/runs/{client.only_run()}/rollouts/train/2/1")
    tokens = page["tokens"]
    assert tokens["id"] == [2, 60, 3, 61, 3]
    assert tokens["mask"] == [0, 0, 0, 1, 1]
    assert tokens["sampler_logprob"] == [None, None, None, -0.5, -0.5]
    assert tokens["advantage"] == [None, None, None, 0.5, 0.5]
    assert tokens["ratio"][3:] == [1.0, pytest.approx(2.0)]
    assert tokens["version"] == [None, None, None, 1, 1]
    assert [(m["role"], m["start"], m["end"], m["loss"]) for m in page["messages"]] == [
        ("prompt", 0, 3, False),
        ("assistant", 3, 5, True),
    ]
    assert page["reward_tree"]["score"] == 1.0
    assert [one["index"] for one in page["siblings"]] == [0, 1]
    assert page["advantage_reason"] is None
    assert "trainer_logprob" not in page["missing"]


def test_numbers_of_a_replay_are_shown_where_they_are_about_these_tokens(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "p" / "a", config=CONFIG, provenance={}, manifest={})
    rows = step_rows(1)[:2]
    write_rollouts(run.rollouts(1), rows, step=1)
    with serving(tmp_path) as client:
        file = tmp_path / f".studio/tokens/{client.only_run()}/step_000001.parquet"
        path = f"/runs/{client.only_run()}/rollouts/train/1"
        before = client.get(f"{path}/0")
        assert (before["replayed"], before["tokens"]["entropy"]) == (None, None)
        numbers = (None,) * 3 + (-0.25, -1.0), (None,) * 3 + (0.5, 0.0)
        found = [
            TokenNumbers(group=str(row.rollout.group), sample=row.rollout.sample,
                         tokens=tokens, trainer_logps=numbers[0], entropy=numbers[1])
            for row, tokens in zip(rows, (rows[0].rollout.tokens, (1, 2, 3, 4, 5)), strict=True)
        ]  # fmt: skip
        write_token_numbers(file, found, is_equal=False)
        page = client.get(f"{path}/0")
        assert page["replayed"] == {"is_equal": False}
        assert page["tokens"]["entropy"] == list(numbers[1])
        assert page["tokens"]["trainer_logprob"] == list(numbers[0])
        assert page["missing"] == {}
        other = client.get(f"{path}/1")
        assert (other["replayed"], other["tokens"]["entropy"]) == (None, None)
        file.write_bytes(file.read_bytes()[:50])
        assert client.get(f"{path}/0")["replayed"] is None


def test_tool_calls_and_hostile_text_are_data(client: Client):
    page = client.get(f"/runs/{client.only_run()}/rollouts/train/1/0")
    assert page["answer"] == f"answer 1 {HOSTILE}"
    [call] = page["tool_calls"]
    assert (call["name"], call["arguments"], call["result"]) == ("sum", {"a": 1}, "2")
    assert page["messages"][1]["tool_calls"] == page["tool_calls"]
    assert "log-probabilities of the trainer" in page["missing"]["trainer_logprob"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("train/1/2", "All 2 rollouts got the reward 1"),
        ("train/1/4", "failed"),
        ("validation/2/0", "Nothing is trained on a validation"),
    ],
)
def test_it_is_said_why_an_advantage_is_0(client: Client, place: str, words: str):
    page = client.get(f"/runs/{client.only_run()}/rollouts/{place}")
    assert words in page["advantage_reason"]


def test_a_group_has_its_rollouts_with_whole_answers(client: Client):
    row = table(client, limit=1, order="asc")["rows"][0]
    place = f"/runs/{client.only_run()}/groups/train/1/{quote(row['group'])}"
    page = client.get(place)
    assert [one["reward"] for one in page["rows"]] == [0.0, 1.0]
    assert (page["mean"], page["std"], page["reason"]) == (0.5, 0.5, None)
    assert page["rows"][0]["answer"] == f"answer 1 {HOSTILE}"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("rollouts/train/9/0", 404),
        ("rollouts/train/1/99", 404),
        ("rollouts/train/1/-1", 404),
        ("rollouts/other/1/0", 422),
        ("rollouts?sort=uid", 422),
        ("rollouts?cursor=x", 422),
        ("rollouts?limit=100000", 422),
        ("rollouts?group=x", 422),
        ("groups/train/1/..%2f..", 404),
    ],
)
def test_what_is_not_there_is_refused(client: Client, path: str, status: int):
    reply = client.ask(f"/api/v1/runs/{client.only_run()}/{path}")
    assert reply.status == status
    assert reply.json["error"]["message"]


def test_while_an_index_is_built_the_requests_after_the_first_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2):
        write_rollouts(tmp_path / f"step_{step:06d}.parquet", step_rows(step), step=step)
    index, gate, read = RolloutIndex(tmp_path), threading.Event(), RolloutIndex.read

    def slowly(step: int) -> None:
        if step == 1:  # the newest is read first
            gate.wait(120)
        read(index, step)

    monkeypatch.setattr(index, "read", slowly)
    with ThreadPoolExecutor(max_workers=1) as pool:
        index.follow(pool, wait_s=1.0)
        begun = time.monotonic()
        for _ in range(100):
            index.follow(pool, wait_s=1.0)
        assert (time.monotonic() - begun < 50.0, index.steps, index.indexed_steps) == (
            True,
            [1, 2],
            1,
        )
        gate.set()
    assert index.indexed_steps == 2


def old_file(path: Path, rows: list[RecordedRollout]) -> None:
    """A file as versions before the summary columns wrote it."""
    write_rollouts(path, rows, step=1)
    new = ("trainer_logps", "length", "last_turn", "version", "mean_advantage", "tool_names")
    found = pq.read_table(path).drop_columns(list(new))
    kept = {**found.schema.metadata, b"luyen.rollouts": b"3"}
    kept.pop(b"luyen.seal")
    pq.write_table(found.replace_schema_metadata(kept), path)


def test_older_files_give_the_same_table(tmp_path: Path):
    config = {"config": CONFIG, "provenance": {}, "manifest": {}}
    old = RunDirectory.create(tmp_path / "one" / "a", **config)
    new = RunDirectory.create(tmp_path / "two" / "a", **config)
    old.rollouts(1).parent.mkdir(exist_ok=True)
    old_file(old.rollouts(1), step_rows(1))
    write_rollouts(new.rollouts(1), step_rows(1), step=1)
    with serving(tmp_path / "one") as one, serving(tmp_path / "two") as two:
        assert table(one)["rows"] == table(two)["rows"]
        page = one.get(f"/runs/{one.only_run()}/rollouts/train/1/1")
        assert "older version" in page["missing"]["trainer_logprob"]


def test_damaged_odd_and_linked_files_are_named_and_the_rest_is_shown(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "p" / "a", config=CONFIG, provenance={}, manifest={})
    for step in (1, 2):
        write_rollouts(run.rollouts(step), step_rows(step), step=step)
    data = run.rollouts(1).read_bytes()
    run.rollouts(3).write_bytes(data[: len(data) // 2])
    run.rollouts(4).write_bytes(b"")
    pq.write_table(pa.table({"x": [1]}), run.rollouts(5))
    run.rollouts(6).symlink_to(run.rollouts(1))
    run.rollouts(7).mkdir()
    with serving(tmp_path) as client:
        page = until(lambda: (p := table(client))["indexed_steps"] == 7 and p)
        assert {row["step"] for row in page["rows"]} == {1, 2}
        assert set(page["damaged"]) == {"3", "4", "5", "6", "7"}
        for step in (3, 4, 5, 6, 7):
            place = f"/api/v1/runs/{client.only_run()}/rollouts/train/{step}/0"
            assert client.ask(place).status in (404, 409)


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "p" / "a", config=CONFIG, provenance={}, manifest={})
    write_rollouts(run.rollouts(1), [rollout(1, reward=0.0)], step=1)
    with serving(tmp_path) as client:
        assert [row["reward"] for row in table(client)["rows"]] == [0.0]
        write_rollouts(run.rollouts(1), [rollout(1, reward=1.0)], step=1)
        write_rollouts(run.rollouts(2), [rollout(2, reward=0.5)], step=2)
        until(lambda: [row["reward"] for row in table(client)["rows"]] == [0.5, 1.0])
        run.rollouts(2).unlink()
        until(lambda: [row["reward"] for row in table(client)["rows"]] == [1.0])
