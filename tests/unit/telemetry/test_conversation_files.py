"""What conversations with tools add to the file of a step, and files from before they did."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luyen.base.records import (
    Branch,
    CallStatus,
    GroupId,
    Rollout,
    Score,
    Source,
    StopReason,
    ToolCall,
)
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts, write_rollouts

VERSION_1 = (
    *("group", "step", "draw", "uid", "sample", "tokens", "sources", "turns", "logps", "versions"),
    *("stop", "text", "reward", "score", "advantage", "fault"),
)
"""Columns of the first version."""

CALLS = (
    ToolCall(turn=0, name="calc", arguments={"x": "6*7"}, status=CallStatus.OK, result="42"),
    ToolCall(
        turn=1,
        name="",
        status=CallStatus.MALFORMED,
        result="mở ngoặc",
        error="line 1",
        reward=-0.1,
        seconds=0.1 + 0.2,
        attempts=3,
    ),
)
BRANCH = Branch(
    tokens=(5, 6, 7),
    sources=(Source.PROMPT, Source.SAMPLED, Source.TEMPLATE),
    turns=(0, 0, 0),
    logps=(None, -0.25, None),
    versions=(None, 4, None),
)


def rollout(**more: Any) -> Rollout:
    shares = Score(name="calls", value=0.75, weight=0.5, by_turn=((0, 0.1 + 0.2), (3, -1.0)))
    base = Rollout(
        group=GroupId(step=3, draw=0, uid="a1b2"),
        sample=0,
        tokens=(5, 8, 9),
        sources=(Source.PROMPT, Source.TOOL, Source.SAMPLED),
        turns=(0, 0, 1),
        logps=(None, None, -0.5),
        versions=(None, None, 4),
        stop=StopReason.ANSWERED,
        text="42",
        score=Score(name="reward", value=0.375, parts=(shares,)),
        calls=CALLS,
        messages=(
            {"role": "assistant", "content": None, "tool_calls": [{"id": 1, "f": {"a": [1.5]}}]},
            {"role": "tool", "content": "42 \u0000 </s>"},
        ),
        earlier=(BRANCH, replace(BRANCH, tokens=(1, 2, 3))),
        given=((0, 0.1 + 0.2), (1, -0.0)),
        notes={"drift": 1.0, "seconds": 0.1},
    )
    return replace(base, **more)


def back(path: Path, *recorded: RecordedRollout) -> list[RecordedRollout]:
    write_rollouts(path / "a.parquet", recorded)
    return read_rollouts(path / "a.parquet")


def test_a_conversation_comes_back_as_it_was(tmp_path: Path):
    row = (None, 0.5, None)
    kept = [
        RecordedRollout(rollout=rollout(), advantages=(None, None, 1.5), earlier=(row, row)),
        RecordedRollout(rollout=rollout(sample=1)),
        RecordedRollout(rollout=rollout(sample=2, earlier=()), advantages=(None, None, 0.25)),
    ]
    read = back(tmp_path, *kept)
    assert read == kept
    assert str(read[0].rollout.given[1][1]) == "-0.0"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(st.characters(codec=None, exclude_categories=()))
"""Any text that Python can hold, half surrogate pairs included."""


@given(
    arguments=st.dictionaries(TEXT, JSON, max_size=3),
    words=st.tuples(TEXT, TEXT, TEXT),
    numbers=st.tuples(st.floats(allow_nan=False), st.none() | st.floats(allow_nan=False)),
    status=st.sampled_from(CallStatus),
)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_call_and_any_message_come_back(
    tmp_path: Path,
    arguments: dict[str, Any],
    words: tuple[str, str, str],
    numbers: tuple[float, float | None],
    status: CallStatus,
):
    name, result, error = words
    call = ToolCall(
        turn=2,
        name=name,
        arguments=arguments,
        status=status,
        result=result,
        error=error,
        seconds=numbers[0],
        reward=numbers[1],
    )
    made = rollout(calls=(call,), messages=({"role": "tool", "content": result, **arguments},))
    [read] = back(tmp_path, RecordedRollout(rollout=made))
    assert read.rollout == made


def test_what_is_no_json_is_kept_as_it_prints(tmp_path: Path):
    made = rollout(calls=(replace(CALLS[0], arguments={"x": {1, 2}}),))
    [read] = back(tmp_path, RecordedRollout(rollout=made))
    assert read.rollout.calls[0].arguments == {"x": "{1, 2}"}


def test_a_person_finds_readable_json(tmp_path: Path):
    write_rollouts(tmp_path / "a.parquet", [RecordedRollout(rollout=rollout())])
    [row] = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert json.loads(row["calls"])[0] == {
        "turn": 0,
        "name": "calc",
        "arguments": {"x": "6*7"},
        "status": "ok",
        "result": "42",
    }
    assert "mở ngoặc" in row["calls"]
    assert '"by_turn": [[0, 0.30000000000000004], [3, -1.0]]' in row["score"]
    assert dict(row["notes"]) == {"drift": 1.0, "seconds": 0.1}
    assert row["earlier"][0]["tokens"] == [5, 6, 7]


def test_a_file_of_the_first_version_is_still_read(tmp_path: Path):
    plain = rollout(calls=(), messages=(), earlier=(), given=(), notes={})
    kept = [RecordedRollout(rollout=plain, advantages=(None, None, 1.0))]
    write_rollouts(tmp_path / "a.parquet", kept)
    table: pa.Table = pq.read_table(tmp_path / "a.parquet")
    old = table.select(VERSION_1).replace_schema_metadata({"luyen.rollouts": "1"})
    pq.write_table(old, tmp_path / "old.parquet")
    assert read_rollouts(tmp_path / "old.parquet") == kept


def test_advantages_stand_beside_the_tokens_of_every_branch():
    with pytest.raises(AssertionError, match="of 1 of 3 branches"):
        RecordedRollout(rollout=rollout(), advantages=(None, None, 1.0))
    with pytest.raises(AssertionError, match="earlier branches only"):
        RecordedRollout(rollout=rollout(), earlier=((None, 0.5, None),) * 2)
