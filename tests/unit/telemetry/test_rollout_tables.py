"""Tables of rollouts: an even choice by address, with what the policy read and said."""

from collections.abc import Sequence

from luyen.base.records import GroupId, Rollout, Score, Source, StopReason
from luyen.telemetry.rollout_tables import COLUMNS, rollout_table

P, S = Source.PROMPT, Source.SAMPLED


def rollout(draw: int, text: str = "4", value: float | None = 0.5, **more: object) -> Rollout:
    facts = {
        "group": GroupId(step=1, draw=draw, uid=f"u{draw}"),
        "sample": 0,
        "tokens": (draw, 2, 3),
        "sources": (P, P, S),
        "turns": (0, 0, 0),
        "logps": (None, None, -0.5),
        "versions": (None, None, 0),
        "stop": StopReason.ANSWERED,
        "text": text,
        "score": None if value is None else Score(name="right", value=value),
    }
    return Rollout(**{**facts, **more})  # type: ignore[arg-type]


def joined(tokens: Sequence[int]) -> str:
    return "+".join(map(str, tokens))


def test_rows_are_chosen_evenly_whatever_order_rollouts_come_in():
    rollouts = [rollout(draw) for draw in range(9)]
    table = rollout_table("t", 5, rollouts[::-1], most=3, decode=joined)
    assert table is not None
    assert table.columns()["prompt"] == ["0+2", "3+2", "6+2"]
    assert rollout_table("t", 5, rollouts, most=3, decode=joined) == table


def test_a_row_holds_prompt_response_and_reward():
    table = rollout_table("t", 5, [rollout(7)], most=8, decode=joined)
    assert table is not None
    [row] = table.rows
    want = {"step": 5, "prompt": "7+2", "response": "4", "reward": 0.5, "stop": "answered"}
    assert dict(zip(COLUMNS, row, strict=True)) == want | {"fault": None, "sample": 0, "tokens": 1}


def test_no_table_without_rollouts_or_where_none_are_wanted():
    assert rollout_table("t", 5, [], most=8, decode=joined) is None
    assert rollout_table("t", 5, [rollout(1)], most=0, decode=joined) is None


def test_what_was_not_scored_has_no_reward_and_shows_its_fault():
    table = rollout_table("t", 1, [rollout(1, value=None, fault="broke")], most=1, decode=joined)
    assert table is not None
    assert (table.columns()["reward"], table.columns()["fault"]) == ([None], ["broke"])


def test_a_conversation_shows_every_message():
    said = (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "7"},
    )
    table = rollout_table("t", 1, [rollout(1, messages=said)], most=1, decode=joined)
    assert table is not None
    assert table.columns()["response"] == ["assistant: {'name': 'add'}\ntool: 7"]


def test_long_text_is_cut_with_a_count_and_half_a_pair_is_replaced():
    both = [rollout(1, text="a" * 10_007), rollout(2, text="\ud800")]
    table = rollout_table("t", 1, both, most=2, decode=joined)
    assert table is not None
    long, half = table.columns()["response"]
    assert long == "a" * 10_000 + " ... (7 more characters)"
    assert half == "?"


def test_a_cell_cannot_break_the_table():
    table = rollout_table("t", 1, [rollout(1, text="a|b\nc")], most=1, decode=joined)
    assert table is not None
    assert table.markdown().splitlines()[2:] == [
        "| 1 | 1+2 | a\\|b<br>c | 0.5 | answered |  | 0 | 1 |"
    ]
