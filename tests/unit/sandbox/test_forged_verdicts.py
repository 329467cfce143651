"""Programs that want to pass without being right: what a judge relies on is out of their reach."""

import asyncio

import pytest

from luyen.sandbox.launch import Limits
from luyen.sandbox.verify import CallCase, Case, Verdict, is_forgeable, verify

TESTS = {
    "assertion": "assert secret(7) == 8675309",
    "shape": "assert sorted(secret(7)) == [8675309, 8675310]",
    "near": "assert abs(secret(7) - 8675309.5) < 1e-3",
    "named": "expected = 8675309\nassert secret(7) == expected",
    "call": CallCase(function="secret", arguments="[7]", accepted=(8675309,)),
    "case": Case(stdin="7", stdout="8675309"),
}
FORGERIES = {
    "writes a message and leaves": """
import os
for fd in range(3, 12):
    try: os.write(fd, b'{"value": null}\\n{"mark": "", "shown": null}\\n')
    except OSError: pass
os._exit(0)
""",
    "floods the channel": "import os\nwhile True: os.write(3, b'\\xff' * 2**20)",
    "sends deep data": "import os\nos.write(3, b'[' * 200000 + b'\\n')\nos._exit(0)",
    "sends deep data as a call": """
import os
def secret(x):
    os.write(3, b'{"tuple": [' * 50000 + b'\\n')
    os._exit(0)
""",
    "closes the channel": "import os\nos.close(3)\ndef secret(x): return 8675308",
    "limits its guard": """
import os, resource
for pid in (1, os.getppid(), os.getpid()):
    for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
        try: resource.prlimit(pid, which, (0, 0))
        except (OSError, ValueError): pass
def secret(x): return 1
""",
    "returns what equals everything": """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __iter__(self): return iter([self, self])
    def __repr__(self): return "8675308"
def secret(x): return Anything()
""",
    "returns numbers that equal everything": """
class Number(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return Number(0)
    def __lt__(self, other): return True
    def __hash__(self): return 0
def secret(x): return Number(1)
""",
    "changes the interpreter": """
import ast, builtins, json, sys
class Liar(int):
    def __eq__(self, other): return True
builtins.abs = lambda x: 0
builtins.sorted = lambda x: Liar(0)
json.dumps = lambda x, **k: '8675308'
sys.exit = lambda *a: None
sys.excepthook = lambda *a: None
def secret(x): return Liar(0)
""",
    "says the end by the mark it found": """
import gc, json, os, sys
frame = sys._getframe()
while frame is not None:
    for value in list(frame.f_locals.values()):
        if isinstance(value, str) and len(value) == 32:
            os.write(3, b'1\\n' + json.dumps({"mark": value, "shown": None}).encode() + b'\\n')
            os._exit(0)
    frame = frame.f_back
""",
    "looks for what is expected": """
import gc, os, sys
def found(text):
    return '9035768' in text[::-1]
hits = []
for thing in gc.get_objects():
    try:
        if found(repr(thing)): hits.append(thing)
    except Exception: pass
frame = sys._getframe()
while frame is not None:
    if found(repr(frame.f_locals)): hits.append(frame)
    frame = frame.f_back
for name in os.listdir('.'):
    if found(open(name, errors='replace').read()) and name != 'main.py': hits.append(name)
def secret(x): return int('9035768'[::-1]) if hits else 0
if __name__ == '__main__': print(secret(0))
""",
    "ends when it is imported": "import os\nos._exit(0)",
    "raises what ends an interpreter": "def secret(x): raise SystemExit(0)",
    "answers at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(1)",
    "is killed by a signal it blocked": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
}


def verdict(program: str, *tests) -> Verdict:
    return asyncio.run(verify(program, tests, Limits(cpu_s=4, wall_s=20.0)))


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_passes_a_test_and_none_is_a_fault(name):
    found = verdict(FORGERIES[name], *TESTS.values())
    assert (found.passed, found.total, found.forgeable) == (0, len(TESTS), 0), found.failures


def test_a_right_program_passes_every_kind_of_test():
    program = """
def secret(x): return 8675302 + x
if __name__ == '__main__': print(secret(int(input())))
"""
    kinds = [TESTS[name] for name in ("assertion", "named", "call", "case")]
    assert verdict(program, *kinds) == Verdict(passed=4, total=4)


def test_an_assertion_that_nobody_can_pass_is_not_passed_by_writing_and_leaving():
    program = "import os\nos.write(3, b'{\"value\": null}')\nos._exit(0)"
    assert verdict(program, "assert False").passed == 0
    assert verdict(program, "if True:\n    assert False").passed == 0


@pytest.mark.parametrize(
    "test",
    [
        "for i in range(3):\n    assert f(i) == i",
        "assert f(1) == f(1)",
        "assert np.allclose(f(1), [1.0])",
        "import numpy as np\nassert np.allclose(f(1), [1.0]) == True",
        "ok = f(1) == 1\nassert ok",
        "check(f)",
        "x = [3, 1]\nassert f(x) == x",
        "assert f(1) == 1 or f(2) == 2",
        "assert all(f(i) == i for i in range(3))",
        "helper.assert_equal(f(1), 1)\nassert f(2) == 2",
        "assert (lambda: f(1))() == 1",
        "value_0 = 1\nassert f(1) == value_0",
        "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "assert f(",
        "pass",
    ],
)
def test_what_runs_in_the_program_s_interpreter_is_called_forgeable(test):
    assert is_forgeable(test)


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("assert 3 == f(1)", "f = lambda x: x + 2", "f = lambda x: x"),
        ("assert f(1) is None", "f = lambda x: None", "f = lambda x: 0"),
        ("assert f(2)\nassert not f(3)", "f = lambda x: x == 2", "f = lambda x: True"),
        ("assert 0 < f(2) <= 5", "f = lambda x: 5", "f = lambda x: 6"),
        ("assert f(2) in (4, 5)", "f = lambda x: 5", "f = lambda x: 3"),
        ("import math\nassert math.isclose(f(1), math.pi)", "from math import *\nf = lambda x: pi",
         "f = lambda x: 3.14"),
        ("assert set(f([1, 2])) == set([2, 1])", "f = lambda x: x", "f = lambda x: x[:1]"),
        ("assert f(2.0) == {'a': (1, [2]), 3: b'x'}", "f = lambda x: {'a': (1, [2]), 3: b'x'}",
         "f = lambda x: {'a': [1, [2]], 3: b'x'}"),
        ("x = [3, 1]\nsort(x)\nassert x == [1, 3]", "def sort(x): x.sort()", "def sort(x): pass"),
        ("assert isinstance(f(1), str) and len(f(1)) == 2", "f = lambda x: 'ab'",
         "f = lambda x: 2"),
        ("assert f(1) == 10**20 + 1", "f = lambda x: 10**20 + x", "f = lambda x: 1e20"),
        ("assert f(1) == 0.5", "from fractions import *\nf = lambda x: Fraction(1, 2)",
         "f = lambda x: 1"),
        ("assert f(3)[1] == 4", "f = lambda x: (x, 4)", "f = lambda x: (4, x)"),
        ("s = Stack()\ns.push(1)\nassert len(s) == 1\nassert s.pop() == 1",
         "class Stack(list):\n    push = list.append",
         "class Stack(list):\n    def push(*a): pass"),
        ("def check(candidate):\n    '''all'''\n    assert candidate([1, 2]) == 3\ncheck(f)",
         "f = sum", "f = max"),
        ("assert f(1) == 3.0", "import numpy\nf = lambda x: numpy.float64(3)",
         "import numpy\nf = lambda x: numpy.arange(3)"),
    ],
)  # fmt: skip
def test_what_is_judged_outside_agrees_with_the_assertion(test, right, wrong):
    assert not is_forgeable(test)
    assert verdict(right, test).passed == 1, verdict(right, test)
    assert verdict(wrong, test).passed == 0
    for program, passes in ((right, True), (wrong, False)):  # Python itself says the same
        names: dict = {}
        try:
            exec(f"{program}\n{test}", names)
        except (AssertionError, ValueError, TypeError):
            assert not passes
        else:
            assert passes
