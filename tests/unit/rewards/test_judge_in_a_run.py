"""Judges as components of a reward: the tree, the cache in a folder, the policy for faults."""

import os
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.rewards.build import build_reward
from luyen.rewards.cache import FILE
from tests.architecture.tree import ROOT
from tests.optional import needs
from tests.unit.rewards.builders import config, group, prompt
from tests.unit.rewards.judge_server import judge_server


@pytest.fixture(scope="module")
def server():
    with judge_server() as server:
        yield server


def block(url: str, **keys):
    return {"base_url": url, "prompt": "{answer}", "scale": [0, 10], "retries": 0, **keys}


def components(url: str, **keys):
    quality = {"judge": block(url, **keys), "weight": 2.0}
    return {"right": {"rule": "exact"}, "quality": quality}


def test_a_judge_is_a_part_of_the_tree_and_is_counted(server):
    settings = config(components=components(server.url("good")))
    with build_reward(settings, max_response_length=16) as reward:
        groups = [group(prompt("good"), "good", "bad"), group(prompt("x"), "good good", draw=1)]
        done = reward.score(groups)
        counts = reward.take_counts()
    flat = [score.flat() for scored in done for score in scored.scores]
    assert flat == [
        {"reward": 1.2, "reward/right": 1.0, "reward/quality": 0.1},
        {"reward": 0.0, "reward/right": 0.0, "reward/quality": 0.0},
        {"reward": 0.4, "reward/right": 0.0, "reward/quality": 0.2},
    ]
    assert counts == {"judging/requests": 3.0}


def test_a_judge_that_fails_is_a_fault_by_name_and_never_a_zero(server):
    settings = config(components=components(server.url("nan")), on_fault="fail")
    with build_reward(settings, max_response_length=16) as reward:
        [done] = reward.score([group(prompt("x"), "x", "y")])
        with pytest.raises(UserError, match="judge not_finite: the score is nan"):
            reward.apply_fault_policy([done])
    assert [score.value for score in done.scores] == [None, None]
    assert done.rollouts[0].fault == "reward: quality: judge not_finite: the score is nan"


def test_a_run_that_goes_on_asks_only_for_what_it_does_not_know(server, tmp_path: Path):
    settings = config(components=components(server.url("good")), cache={"enable": True})
    found, counts = [], []
    for texts in (["good", "bad"], ["good", "bad", "good good"]):
        with build_reward(settings, max_response_length=16, folder=tmp_path) as reward:
            [done] = reward.score([group(prompt("x"), *texts)])
            found.append([score.value for score in done.scores])
            counts.append(reward.take_counts())
    assert found == [[0.2, 0.0], [0.2, 0.0, 0.4]]
    assert (tmp_path / FILE).is_file()
    assert counts == [
        {"judging/cache_misses": 2.0, "judging/requests": 2.0},
        {"judging/cache_hits": 2.0, "judging/cache_misses": 1.0, "judging/requests": 1.0},
    ]


@needs("math_verify")
def test_runs_share_a_cache_by_its_path_and_rules_are_kept_too(tmp_path: Path):
    path = tmp_path / "shared.sqlite"
    settings = config(cache={"enable": True, "path": str(path)}, num_workers=1)
    counts = []
    for _ in range(2):
        with build_reward(settings, max_response_length=16, folder=tmp_path) as reward:
            [done] = reward.score([group(prompt("12", "math_x"), "$12$", "$13$")])
            assert [score.value for score in done.scores] == [1.0, 0.0]
            counts.append((reward.take_counts(), len(reward.pids)))
    assert counts == [({"judging/cache_misses": 2.0}, 1), ({"judging/cache_hits": 2.0}, 0)]
    assert os.listdir(tmp_path) == ["shared.sqlite"]


def test_memory_of_judging_processes_is_limited_by_the_configuration(tmp_path: Path):
    file = tmp_path / "greedy.py"
    file.write_text("def compute_score(**_):\n    return len(bytearray(2**30)) / 2**30\n")
    own = {"path": str(file)}
    found = []
    for memory_mb in (256, None):
        settings = config(
            custom_reward_function=own,
            memory_mb=memory_mb,
            num_workers=1,
            reward_manager={"name": "prime"},
        )
        with build_reward(settings, max_response_length=16) as reward:
            [done] = reward.score([group(prompt("x"), "x")])
        found.append((done.scores[0].value, done.scores[0].error))
    why = "out of memory: judging took more than 256 MiB (reward.memory_mb)"
    assert found == [(None, why), (1.0, None)]


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ("{base_url: 'http://h/v1', prompt: '{answer}'}", None),
        ("{base_url: 'http://h/v1', prompt: 'Good?'}", "does not show {answer}"),
        ("{base_url: 'http://h/v1', prompt: '{answer}', promt: x}", "promt"),
    ],
)
def test_check_reads_judges(judge, why):
    keys = [f"reward.components={{quality: {{judge: {judge}}}}}"]
    report = check([ROOT / "recipes" / "quickstart.yaml"], keys)
    errors = [p.why for p in report.problems if p.severity == "error"]
    assert (errors == []) if why is None else any(why in error for error in errors)
