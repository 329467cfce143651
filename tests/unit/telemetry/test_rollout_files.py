"""A rollout comes back from its file as it was: every token, float and score."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.base.records import GroupId, Rollout, Score, Source, StopReason
from luyen.telemetry.rollout_codec import score_of, score_tree
from luyen.telemetry.rollout_files import (
    CHECKSUM,
    NO_CHECKSUM,
    RecordedRollout,
    read_rollouts,
    with_checksum,
    write_rollouts,
)


def rollout(sample: int = 0, *, draw: int = 0) -> Rollout:
    exact = Score(name="exact", value=1.0, weight=0.9)
    broken = Score(name="format", value=None, weight=0.1, error="timed out after 5 s")
    return Rollout(
        group=GroupId(step=3, draw=draw, uid="a1b2"),
        sample=sample,
        tokens=(5, 151_643, 7, 8),
        sources=(Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.SAMPLED),
        turns=(0, 0, 0, 1),
        logps=(None, -0.1, None, -1e-45),
        versions=(None, 2, None, 3),
        stop=StopReason.TOKEN_BUDGET,
        text="bằng 7\n\x00",
        score=Score(name="total", value=0.9, parts=(exact, broken)),
    )


def test_a_rollout_comes_back_as_it_was(tmp_path: Path):
    kept = [
        RecordedRollout(rollout=rollout(0), advantages=(None, 0.1 + 0.2, None, -1.5)),
        RecordedRollout(rollout=replace(rollout(1), score=None, fault="tool: refused")),
        RecordedRollout(rollout=replace(rollout(2), score=Score(name="t", value=math.inf))),
    ]
    write_rollouts(tmp_path / "deep" / "step_000003.parquet", kept)
    assert read_rollouts(tmp_path / "deep" / "step_000003.parquet") == kept


def test_a_tree_comes_back_with_what_was_made_of_it(tmp_path: Path):
    clipped = Score(name="brief", value=-1.0, raw=-1 / 3, seconds=0.25)
    gated = Score(name="judge", value=0.0, weight=0.5, gated=True)
    tree = Score(name="reward", value=-1.0, parts=(clipped, gated), combine="min")
    write_rollouts(
        tmp_path / "a.parquet", [RecordedRollout(rollout=replace(rollout(), score=tree))]
    )
    [read] = read_rollouts(tmp_path / "a.parquet")
    assert read.rollout.score == tree
    assert read.rollout.score.parts[0].seconds == 0.25


def test_a_reply_of_a_judge_comes_back_and_is_bounded(tmp_path: Path):
    said = Score(
        name="clear", value=0.7, reply="<b>fine</b> \x00 https://me:pass@host " + "é" * 20_000
    )
    tree = Score(name="reward", value=0.7, parts=(said,))
    write_rollouts(
        tmp_path / "a.parquet", [RecordedRollout(rollout=replace(rollout(), score=tree))]
    )
    [read] = read_rollouts(tmp_path / "a.parquet")
    assert read.rollout.score is not None
    [part] = read.rollout.score.parts
    assert part.reply is not None
    assert part.reply.startswith("<b>fine</b> \x00 https://***@host é")
    assert 16_000 < len(part.reply) <= 16_384
    assert "reply" not in score_tree(tree, is_timed=False)["parts"][0]
    assert part == replace(part, reply="the same score in other words")


def test_a_tree_of_an_older_file_has_nothing_made_of_it():
    old = {"name": "reward", "value": 1.0, "parts": [{"name": "right", "value": 1.0}]}
    read = score_of(old)
    assert read == Score(name="reward", value=1.0, parts=(Score(name="right", value=1.0),))
    assert (read.raw, read.gated, read.combine, read.seconds) == (None, False, "sum", None)
    assert score_tree(read) == old


finite = st.floats(allow_nan=False)


@given(
    logps=st.lists(st.none() | finite, max_size=5),
    value=st.none() | finite,
    text=st.text(st.characters(exclude_categories=["Cs"])),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_float_and_any_text_come_back(
    tmp_path: Path, logps: list[float | None], value: float | None, text: str
):
    count = len(logps)
    made = replace(
        rollout(),
        tokens=(0,) * count,
        sources=(Source.SAMPLED,) * count,
        turns=(0,) * count,
        logps=tuple(logps),
        versions=(0,) * count,
        text=text,
        score=Score(name="total", value=value, error=text or None),
    )
    write_rollouts(tmp_path / "a.parquet", [RecordedRollout(rollout=made, advantages=tuple(logps))])
    [read] = read_rollouts(tmp_path / "a.parquet")
    assert read.rollout == made
    assert [str(x) for x in read.advantages or ()] == [str(x) for x in logps], (
        "and the sign of -0.0"
    )


def test_the_order_of_finishing_changes_no_byte(tmp_path: Path):
    kept = [RecordedRollout(rollout=rollout(s, draw=d)) for d in (0, 1) for s in (0, 1, 2)]
    write_rollouts(tmp_path / "a.parquet", kept)
    write_rollouts(tmp_path / "b.parquet", reversed(kept))
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert [r.rollout.key for r in read_rollouts(tmp_path / "b.parquet")] == [
        r.rollout.key for r in kept
    ]


def test_a_person_finds_plain_columns(tmp_path: Path):
    write_rollouts(tmp_path / "a.parquet", [RecordedRollout(rollout=rollout())])
    [row] = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["group"] == "3.0.a1b2"
    assert row["reward"] == 0.9
    assert row["stop"] == "token budget"
    assert row["score"] == (
        '{"name": "total", "value": 0.9, "parts": [{"name": "exact", "value": 1.0, "weight": 0.9}, '
        '{"name": "format", "value": null, "weight": 0.1, "error": "timed out after 5 s"}]}'
    )


def test_a_step_without_rollouts_is_a_file_without_rows(tmp_path: Path):
    write_rollouts(tmp_path / "a.parquet", [])
    assert read_rollouts(tmp_path / "a.parquet") == []


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_a_torn_file_is_named(tmp_path: Path, keep: int):
    path = tmp_path / "step_000003.parquet"
    write_rollouts(path, [RecordedRollout(rollout=rollout())])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"step_000003\.parquet.*cannot be read"):
        read_rollouts(path)


def test_a_missing_file_and_a_foreign_one_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_rollouts(tmp_path / "none.parquet")
    write_rollouts(tmp_path / "a.parquet", [])
    table = pq.read_table(tmp_path / "a.parquet").replace_schema_metadata({"luyen.rollouts": "9"})
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"version 9.*newer luyen"):
        read_rollouts(tmp_path / "b.parquet")


def test_advantages_stand_beside_every_token():
    with pytest.raises(AssertionError, match="2 advantages for 4 tokens"):
        RecordedRollout(rollout=rollout(), advantages=(1.0, 1.0))


@pytest.mark.parametrize("apart", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_bit_is_found_before_the_file_is_read(tmp_path: Path, apart: int):
    path = tmp_path / "step_000003.parquet"
    write_rollouts(path, [RecordedRollout(rollout=rollout())])
    content = path.read_bytes()
    for place in range(0, 8 * len(content), apart):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"step_000003\.parquet"):
            read_rollouts(path)


def test_a_file_of_a_version_without_seals_is_read(tmp_path: Path):
    write_rollouts(tmp_path / "a.parquet", [RecordedRollout(rollout=rollout())])
    table = pq.read_table(tmp_path / "a.parquet").replace_schema_metadata({"luyen.rollouts": "3"})
    pq.write_table(table, tmp_path / "b.parquet")
    assert read_rollouts(tmp_path / "b.parquet") == read_rollouts(tmp_path / "a.parquet")


def _odd(column: pa.ChunkedArray) -> dict[str, pa.Array | None]:
    """What may stand in the place of a column; None: nothing."""
    count, kind = len(column), column.type
    odd: dict[str, pa.Array | None] = {
        "missing": None,
        "nulls": pa.nulls(count, kind),
        "text": pa.array(["x"] * count),
        "numbers": pa.array([10**12] * count),
        "deep": pa.array([[[["x"]]]] * count),
        "json": pa.array(['{"a": [1]}'] * count),
    }
    if pa.types.is_list(kind):
        cells = column.to_pylist()
        odd["shorter"] = pa.array([None if c is None else c[:-1] for c in cells], kind)
        odd["longer"] = pa.array([None if c is None else [*c, *c[-1:]] for c in cells], kind)
        odd["holes"] = pa.array([None if c is None else [None for _ in c] for c in cells], kind)
    return odd


def test_columns_that_are_odd_are_refused_with_the_file_or_read_as_the_records_that_they_are(
    tmp_path: Path,
):
    """Somebody who can write the file can give it a checksum that fits."""
    file = tmp_path / "a.parquet"
    write_rollouts(file, [RecordedRollout(rollout=rollout(i)) for i in range(2)])
    table = pq.read_table(file)
    metadata = {**table.schema.metadata, CHECKSUM: NO_CHECKSUM}
    outcomes: dict[bool, int] = {True: 0, False: 0}
    said: list[str] = []
    for place, name in enumerate(table.column_names):
        for kind, column in _odd(table.column(place)).items():
            less = table.remove_column(place)
            changed = less if column is None else less.add_column(place, name, column)
            buffer = io.BytesIO()
            pq.write_table(changed.replace_schema_metadata(metadata), buffer)
            file.write_bytes(with_checksum(buffer.getvalue()))
            try:
                read = read_rollouts(file)
                outcomes[True] += 1
                assert all(isinstance(one.rollout.text, str) for one in read), (name, kind)
                assert all(type(t) is int for one in read for t in one.rollout.tokens), (name, kind)
            except UserError as error:
                said.append(str(error))
                outcomes[False] += 1
    assert all(str(file) in text for text in said)
    assert outcomes[True] > 20
    assert outcomes[False] > 80
