"""Verifiers that fork, loop, eat memory, flood, exit or ignore signals: a fault each, no hang."""

import asyncio
from pathlib import Path
from time import monotonic, sleep

import pytest

from luyen.rewards.calls import ScoreCall, ScoreOutcome
from luyen.rewards.pool import ScoringPool
from luyen.rewards.rules.rule import rule_rewards
from tests.optional import needs
from tests.unit.rewards.builders import answer, prompt

CODE = """
import os, signal, subprocess, sys, time

kept = []

def right(): return 1.0
def loop():
    while True: pass
def loop_deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True: pass
def loop_quietly():
    while True:
        try:
            while True: time.sleep(1)
        except BaseException: pass
def eat():
    while True: kept.append(bytearray(2**24))
def leave(): os._exit(0)
def crash(): os.kill(os.getpid(), signal.SIGSEGV)
def deep(): return deep()
def flood():
    line = b"x" * 2**16
    for _ in range(2**13): os.write(1, line)
    return 0.5
def flood_for_ever():
    while True: print("x" * 2**16, flush=True); print("y" * 2**16, file=sys.stderr, flush=True)
def fork_and_return():
    return 0.25 if os.fork() else 0.75
def fork_and_raise():
    if os.fork() == 0: raise ValueError("in the copy")
    return 0.25
def fork_and_exit():
    if os.fork(): os._exit(0)
    time.sleep(60)
def bomb():
    for _ in range(6): os.fork()  # bounded: an endless one would take the whole machine
    time.sleep(60)
def litter(path, number):
    for _ in range(number):
        child = subprocess.Popen(["sleep", "60"])
        open(path, "a").write(f"{child.pid}\\n")
    return 1.0
def orphans():
    for _ in range(5):
        subprocess.run(["sh", "-c", "true & true &"])
    time.sleep(0.05)
    return float(len(open("/proc/self/task/%d/children" % os.getpid()).read().split()))
def hide(path):
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open(path, "a").write(f"{child.pid}\\n")
    time.sleep(60)
"""


@pytest.fixture
def call(tmp_path: Path):
    file = tmp_path / "verifiers.py"
    file.write_text(CODE)
    return lambda name, **arguments: ScoreCall(name=name, source=str(file), arguments=arguments)


def is_alive(pid: int) -> bool:
    """Whether a process runs; the dead that nobody has buried do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def run(
    *calls: ScoreCall, timeout_s: float = 1.0, memory_bytes: int | None = 2**29
) -> list[ScoreOutcome]:
    """One after the other in the same pool of one, which leaves nothing behind."""

    async def each() -> list[ScoreOutcome]:
        return [(await pool.run([call]))[0] for call in calls]

    pool = ScoringPool(size=1, timeout_s=timeout_s, memory_bytes=memory_bytes)
    try:
        return asyncio.run(each())
    finally:
        pids = pool.pids
        pool.close()
        assert not any(map(is_alive, pids))


LATE = "no score within 1 s (reward.timeout_s)"
ENDED = "the process that computed it ended (exit code {})"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("loop", LATE),
        ("loop_deaf", LATE),
        ("loop_quietly", LATE),
        ("flood_for_ever", LATE),
        ("bomb", LATE),
        ("leave", ENDED.format(0)),
        ("crash", ENDED.format(-11)),
        ("eat", "out of memory: judging took more than 512 MiB (reward.memory_mb)"),
    ],
)
def test_a_hostile_verifier_is_one_fault_in_its_time_and_the_pool_goes_on(call, name, error, capfd):
    start = monotonic()
    # Half a GiB is not written in a second on every machine.
    timeout_s = 20.0 if name == "eat" else 1.0
    before, found, after = run(call("right"), call(name), call("right"), timeout_s=timeout_s)
    assert (before.numbers, after.numbers) == ({"score": 1.0}, {"score": 1.0})
    assert (found.error, found.numbers) == (error, None)
    assert monotonic() - start < 30
    assert len(capfd.readouterr().err) < 2**21


def test_recursion_without_end_is_an_ordinary_fault(call):
    [found] = run(call("deep"))
    assert (found.error or "").startswith("RecursionError")


def test_a_flood_of_output_is_cut_and_the_score_stands(call, capfd):
    [found] = run(call("flood"), timeout_s=20.0)
    assert found.numbers == {"score": 0.5}
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err) < 2**21
    assert "more output of judging code was dropped" in said.err


@pytest.mark.parametrize("name", ["fork_and_return", "fork_and_raise"])
def test_the_copy_that_a_verifier_forked_answers_nothing(call, name):
    found = run(*[call(name), call("right")] * 3, timeout_s=20.0)
    assert [outcome.numbers for outcome in found] == [{"score": 0.25}, {"score": 1.0}] * 3


def test_a_parent_that_exits_and_a_copy_that_stays_are_one_fault(call):
    found, after = run(call("fork_and_exit"), call("right"))
    assert found.error is not None
    assert after.numbers == {"score": 1.0}


def gone(path: Path) -> bool:
    """Whether all processes named in a file end within a few seconds."""
    deadline = monotonic() + 5
    pids = [int(line) for line in path.read_text().split()]
    while any(map(is_alive, pids)) and monotonic() < deadline:
        sleep(0.01)
    return bool(pids) and not any(map(is_alive, pids))


def test_a_child_in_a_session_of_its_own_ends_with_the_verifier(call, tmp_path):
    note = tmp_path / "pids"
    [found] = run(call("hide", path=str(note)))
    assert found.error == LATE
    assert gone(note)


def test_a_few_children_may_stay_and_many_are_a_fault(call, tmp_path):
    note = tmp_path / "pids"
    few, many, after = run(
        call("litter", path=str(note), number=2),
        call("litter", path=str(note), number=20),
        call("right"),
        timeout_s=20.0,
    )
    assert few.numbers == after.numbers == {"score": 1.0}
    assert many.error == "judging left more than 16 processes behind"
    assert gone(note)


def test_the_dead_are_no_fault_and_are_buried(call):
    found = run(*[call("orphans") for _ in range(12)], timeout_s=20.0)
    counts = [outcome.numbers["score"] if outcome.numbers else None for outcome in found]
    assert None not in counts
    assert max(count for count in counts if count is not None) <= 30


def test_programs_in_the_sandbox_leave_nothing_in_the_process_that_judges():
    texts = ["def f(): return 1", "import os\nos.fork()\ndef f(): return 1", "while True: pass"]
    tests = ["assert f() == 1"]
    calls = [
        ScoreCall(
            name="code",
            source=None,
            rule=True,
            arguments={"prompt": prompt(tests), "answer": answer(text), "cpu_s": 1},
        )
        for text in [*texts, *texts[:1] * 16]
    ]
    found = run(*calls, timeout_s=20.0)
    assert [outcome.error for outcome in found] == [None] * 19


def test_memory_without_a_limit_is_not_limited(call):
    [found] = run(call("right"), memory_bytes=None)
    assert found.numbers == {"score": 1.0}


BOMBS = [
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{" + r"\frac{" * 500 + "}",
    r"\boxed{(x+1)^{100000} - (x+2)^{99999}}",
]


@needs("math_verify")
def test_no_latex_hangs_math_verify():
    def judged(text: str) -> ScoreCall:
        arguments = {"prompt": prompt("x+1"), "answer": answer(text)}
        return ScoreCall(name="math", source=None, rule=True, arguments=arguments)

    assert rule_rewards.facts("math")["isolated"]
    start = monotonic()
    *found, after = run(*map(judged, [*BOMBS, "$1+x$"]), timeout_s=1.0, memory_bytes=2**31)
    assert [o.error is not None or o.numbers == {"score": 0.0} for o in found] == [True] * 3
    assert after.numbers == {"score": 1.0}
    assert monotonic() - start < 60
