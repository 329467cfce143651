"""A whole step: order, limits, times, faults, and nothing left running."""

import asyncio
import gc
import os
import subprocess
import sys
from dataclasses import replace
from time import monotonic, sleep

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.rewards.calls import ScoreCall
from luyen.rewards.metrics import score_metrics
from luyen.rewards.pool import ScoringPool
from luyen.rewards.scoring import Tolerance, apply_fault_policy, score_all
from tests.unit.rewards.builders import config, group, own, prompt, scored


class Backwards:
    """Finishes later groups first, and counts how many it judges at once."""

    names = ("score",)

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, prompt, rollouts):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02 / (1 + rollouts[0].group.draw))
        self.now -= 1
        return [Score(name="reward", value=float(rollout.text)) for rollout in rollouts]


def test_results_keep_the_order_of_the_groups_and_the_limit_holds():
    reward = Backwards()
    groups = [group(prompt(), str(i), str(i + 0.5), draw=i) for i in range(7)]
    found = asyncio.run(score_all(reward, groups, num_workers=3))
    assert [[s.value for s in one.scores] for one in found] == [[i, i + 0.5] for i in range(7)]
    assert reward.most == 3
    assert found[0].seconds == (None, None)
    assert [r.sample for r in found[3].rollouts] == [0, 1]


def test_the_first_error_stops_the_step():
    class Broken(Backwards):
        async def __call__(self, prompt, rollouts):
            if rollouts[0].group.draw == 1:
                raise UserError("a", 1, "b", "c")
            return await super().__call__(prompt, rollouts)

    with pytest.raises(UserError):
        asyncio.run(score_all(Broken(), [group(prompt(), "1", draw=i) for i in range(3)]))


def test_time_is_measured_per_rollout(tmp_path):
    code = """
from time import sleep
def compute_score(data_source, solution_str, ground_truth, extra_info):
    sleep(float(solution_str))
    return 1.0
"""
    settings = config(custom_reward_function=own(tmp_path / "sleepy.py", code))
    [done] = scored(settings, [group(prompt("", "mine"), "0.05", "0")])
    assert done.seconds[0] >= 0.05
    assert done.seconds[1] < 0.05


FAULTY = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str), "acc": 1}
"""


def faulty(tmp_path, *texts):
    settings = config(custom_reward_function=own(tmp_path / "faulty.py", FAULTY))
    return scored(settings, [group(prompt("", "mine"), *texts)])


def test_a_fault_is_counted_recorded_and_leaves_its_siblings_alone(tmp_path):
    done = faulty(tmp_path, "1", "x", "3")
    assert [r.fault is None for r in done[0].rollouts] == [True, False, True]
    metrics = score_metrics(done)
    assert metrics.pop("time/reward") == pytest.approx(metrics.pop("time/reward/score"))
    assert metrics == {
        "reward/mean": 2.0,
        "reward/acc/mean": 1.0,
        "reward/score/mean": 2.0,
        "reward/std": 1.0,
        "reward/min": 1.0,
        "reward/max": 3.0,
        "reward/faults": 1.0,
        "reward/score/faults": 1.0,
    }


def test_metrics_of_a_sound_step_count_no_faults(tmp_path):
    metrics = score_metrics(faulty(tmp_path, "1", "3"))
    assert metrics["reward/faults"] == 0.0
    assert score_metrics([]) == {"reward/faults": 0.0, "time/reward": 0}


def test_the_policy_for_faults_is_to_stop_or_to_drop(tmp_path):
    done = faulty(tmp_path, "1", "x")
    with pytest.raises(UserError) as caught:
        apply_fault_policy(done, Tolerance(on_fault="fail"))
    message = str(caught.value)
    assert "1 of 2 scores could not be computed" in message
    assert "could not convert string to float: 'x'" in message
    assert "data source `mine`, group 0.0.u" in message
    assert [r.text for r in apply_fault_policy(done, Tolerance(on_fault="drop"))] == ["x"]
    assert apply_fault_policy(faulty(tmp_path, "1"), Tolerance(on_fault="fail")) == []


def test_a_step_without_any_score_stops_whatever_the_policy(tmp_path):
    with pytest.raises(UserError, match="2 of 2"):
        apply_fault_policy(faulty(tmp_path, "x", "y"), Tolerance(on_fault="drop"))


def test_an_earlier_fault_of_a_rollout_is_kept():
    class Lost(Backwards):
        async def __call__(self, prompt, rollouts):
            return [Score(name="reward", value=None, error="lost") for _ in rollouts]

    asked, [one] = group(prompt(), "1")
    [done] = asyncio.run(score_all(Lost(), [(asked, [replace(one, fault="tool died"), one])]))
    assert [r.fault for r in done.rollouts] == ["tool died", "reward: lost"]


def pid_call(tmp_path, body="os.getpid()"):
    file = tmp_path / "pid.py"
    file.write_text(f"import os, time\ndef pid(**_):\n    return {body}\n")
    return ScoreCall(name="pid", source=str(file), arguments={})


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_are_reused_and_end_with_the_pool(tmp_path):
    pool = ScoringPool(size=1, timeout_s=5.0)
    outcomes = asyncio.run(pool.run([pid_call(tmp_path)] * 3))
    [pid] = {outcome.numbers["score"] for outcome in outcomes}
    assert pool.pids == [pid]
    assert is_alive(int(pid))
    pool.close()
    pool.close()
    assert not is_alive(int(pid))
    assert pool.pids == []


def test_a_forgotten_pool_takes_its_processes_along(tmp_path):
    pool = ScoringPool(size=1, timeout_s=5.0)
    [outcome] = asyncio.run(pool.run([pid_call(tmp_path)]))
    del pool
    gc.collect()
    deadline = monotonic() + 5
    while is_alive(int(outcome.numbers["score"])) and monotonic() < deadline:
        sleep(0.01)
    assert not is_alive(int(outcome.numbers["score"]))


def test_closing_a_busy_pool_does_not_wait_for_it(tmp_path):
    async def close_early():
        pool = ScoringPool(size=1, timeout_s=60.0)
        waiting = asyncio.ensure_future(pool.run([pid_call(tmp_path, "time.sleep(60)")]))
        while not pool.pids:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pool.close)
        return pool, await waiting

    start = monotonic()
    pool, [outcome] = asyncio.run(close_early())
    assert outcome.error == "the process that computed it ended (exit code -9)"
    assert monotonic() - start < 30
    assert pool.pids == []


def test_a_file_that_does_not_load_in_the_process_is_a_fault(tmp_path):
    folder = tmp_path / "a_folder_with_a_long_name" / ("x" * 100)
    folder.mkdir(parents=True)
    file = folder / "broken.py"
    file.write_text("import nowhere_at_all\n")
    pool = ScoringPool(size=1, timeout_s=5.0)
    [outcome] = asyncio.run(pool.run([ScoreCall(name="f", source=str(file), arguments={})]))
    pool.close()
    assert "/broken.py': importing it failed" in outcome.error
    assert "No module named 'nowhere_at_all'" in outcome.error


OWNER = """
import asyncio, os, sys, threading, time
from luyen.rewards.calls import ScoreCall
from luyen.rewards.pool import ScoringPool

pool = ScoringPool(size=1, timeout_s=60.0)
call = ScoreCall(name="pid", source=sys.argv[1], arguments={})
threading.Thread(target=lambda: asyncio.run(pool.run([call])), daemon=True).start()
while not pool.pids:
    time.sleep(0.01)
time.sleep(0.5)
print(pool.pids[0], flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_busy_process_does_not_outlive_its_killed_owner(tmp_path):
    call = pid_call(tmp_path, "time.sleep(60)")
    command = [sys.executable, "-c", OWNER, str(call.source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    pid = int(done.stdout)
    deadline = monotonic() + 10
    while is_alive(pid) and monotonic() < deadline:
        sleep(0.05)
    assert not is_alive(pid)
