"""A function of the user: what it may return, and what becomes of its faults."""

import pytest

from luyen.base.errors import UserError
from tests.unit.rewards.builders import config, group, own, prompt, scored, scores

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info"


@pytest.mark.parametrize("name", ["naive", "prime"])
@pytest.mark.parametrize("keyword", ["", "async "])
def test_it_is_called_with_the_row_and_the_answer(tmp_path, name, keyword):
    code = f"""
{keyword}{HEAD}, bonus):
    assert data_source == "mine" and extra_info == {{"index": 3}}
    right = solution_str == ground_truth
    return {{"score": right + bonus, "acc": right, "pred": solution_str}}
"""
    block = own(tmp_path / "mine.py", code, reward_kwargs={"bonus": 0.25})
    settings = config(custom_reward_function=block, reward_manager={"name": name}, num_workers=1)
    found = scores(settings, prompt("4", "mine", index=3), "4", "5")
    assert [score.flat() for score in found] == [
        {"reward": 1.25, "reward/score": 1.25, "reward/acc": 1.0},
        {"reward": 0.25, "reward/score": 0.25, "reward/acc": 0.0},
    ]
    assert [part.weight for part in found[0].parts] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["naive", "prime"])
def test_an_exception_is_the_fault_of_one_rollout(tmp_path, name):
    code = f"{HEAD}):\n    return 1 / len(solution_str)\n"
    settings = config(
        custom_reward_function=own(tmp_path / "one.py", code),
        reward_manager={"name": name},
        num_workers=1,
    )
    found = scores(settings, prompt("4", "mine"), "ab", "", "a")
    assert [score.value for score in found] == [0.5, None, 1.0]
    assert found[1].error == "ZeroDivisionError: division by zero (one.py:2)"
    assert found[1].parts[0].error == found[1].error


@pytest.mark.parametrize("name", ["naive", "prime"])
@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("None", "returned None"),
        ("'1'", "returned '1'"),
        ("[1.0]", r"returned \[1.0\]"),
        ("float('nan')", "returned nan"),
        ("-float('inf')", "returned -inf"),
        ("{'acc': 1.0}", r"returned \{'acc': 1.0\}"),
        ("compute_score", "returned <function compute_score"),
    ],
)
def test_what_is_no_score_names_file_function_and_value(tmp_path, name, expression, shown):
    block = own(tmp_path / "bad.py", f"{HEAD}):\n    return {expression}\n")
    settings = config(custom_reward_function=block, reward_manager={"name": name}, num_workers=1)
    with pytest.raises(UserError, match=shown) as caught:
        scores(settings, prompt("4", "mine"), "4")
    assert "bad.py" in str(caught.value)
    assert "compute_score" in str(caught.value)


def test_a_coroutine_that_never_ends_is_a_fault(tmp_path):
    body = "await asyncio.sleep(len(solution_str) * 60)"
    code = f"import asyncio\nasync {HEAD}):\n    {body}\n    return 1\n"
    settings = config(custom_reward_function=own(tmp_path / "slow.py", code), timeout_s=0.1)
    found = scores(settings, prompt("4", "mine"), "", "x", "")
    assert [score.value for score in found] == [1.0, None, 1.0]
    assert found[1].error == "no score within 0.1 s (reward.timeout_s)"


@pytest.mark.parametrize(
    ("code", "block", "message"),
    [
        ("1 / 0\n", {}, "importing it failed: ZeroDivisionError"),
        ("def compute_scores(): ...\n", {}, "did you mean `compute_scores`"),
        ("def compute_score(answer): ...\n", {}, r"define it as compute_score\(data_source, "),
        (f"{HEAD}): ...\n", {"reward_kwargs": {"x": 1}}, "other arguments"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_once(tmp_path, code, block, message):
    settings = config(custom_reward_function=own(tmp_path / "unusable.py", code, **block))
    with pytest.raises(UserError, match=message):
        scores(settings, prompt("4", "mine"), "4")


def test_a_file_that_is_not_there_is_refused():
    settings = config(custom_reward_function={"path": "/nowhere/reward.py"})
    with pytest.raises(UserError, match="no such Python file"):
        scores(settings, prompt("4", "mine"), "4")


BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos"


def test_batch_makes_one_call_for_the_whole_step(tmp_path):
    code = f"""
calls = []
{BATCH}, scale):
    calls.append(len(solution_strs))
    assert calls == [3] and data_sources == ["a", "a", "b"]
    pairs = zip(solution_strs, ground_truths)
    return [{{"score": scale * (s == t), "calls": len(calls)}} for s, t in pairs]
"""
    block = own(tmp_path / "batch.py", code, reward_kwargs={"scale": 2})
    settings = config(custom_reward_function=block, reward_manager={"name": "batch"})
    groups = [group(prompt("4", "a"), "4", "5"), group(prompt("6", "b"), "6", draw=1)]
    found = scored(settings, groups)
    assert [[s.value for s in one.scores] for one in found] == [[2.0, 0.0], [2.0]]
    assert found[1].scores[0].flat()["reward/calls"] == 1.0
    assert all(seconds is not None for one in found for seconds in one.seconds)


def test_a_batch_of_nothing_is_not_asked_for(tmp_path):
    block = own(tmp_path / "none.py", f"{BATCH}):\n    raise AssertionError\n")
    settings = config(custom_reward_function=block, reward_manager={"name": "batch"})
    assert scored(settings, []) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned 1 entries for 2 answers"),
        ("return 1.0", "returned 1.0 for 2 answers"),
        ("return [1.0, None]", "returned None, which is no score"),
    ],
)
def test_a_batch_that_does_not_answer_for_everyone_is_refused(tmp_path, body, message):
    block = own(tmp_path / "short.py", f"{BATCH}):\n    {body}\n")
    settings = config(custom_reward_function=block, reward_manager={"name": "batch"})
    with pytest.raises(UserError, match=message):
        scores(settings, prompt("4", "mine"), "4", "5")


def test_a_batch_that_fails_is_the_fault_of_all(tmp_path):
    block = own(tmp_path / "fails.py", f"{BATCH}):\n    raise OSError('no network')\n")
    settings = config(custom_reward_function=block, reward_manager={"name": "batch"})
    found = scores(settings, prompt("4", "mine"), "4", "5")
    assert [score.value for score in found] == [None, None]
    assert found[0].error == "OSError: no network (fails.py:2)"
