"""Source text of functions: what another process imports is the function with all it uses."""

import importlib
import linecache
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.source_files import NoSource
from luyen.config.objects.object_source import module_text
from luyen.config.python_objects import absent_object, is_loaded, write_objects
from luyen.rewards.user_functions import load_function

SCRIPT = """
import functools
import math as m
import re
from collections import Counter

LIMIT = {"words": [1, 2.5, None], "deep": ("a", b"b")}
WORD = re.compile(r"[a-z]+", re.IGNORECASE)

def doubled(function):
    @functools.wraps(function)
    def inner(*a, **k):
        return 2 * function(*a, **k)
    return inner

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

@doubled
def uses_all(text, *, base=m.floor(2.7)):
    found = [w for w in WORD.findall(text)]
    count = Counter(found)
    LIMIT["words"][0]
    return base * len(count) + even(len(found)) + m.sqrt(4)

def made(step):
    def plus(n):
        return n + step
    return plus

plus_three = made(3)
first, second = lambda n: n + 1, lambda n: n + 2
import threading
opened = threading.Lock()

def reads(text):
    return str(opened) + text

seen, calls, table = [1], 5, {"a": [3]}

def counts(text):
    global calls
    calls += 1
    seen.append(text)
    return calls, len(seen), table["a"]

def misspelt(text):
    return no_such_name(text)

weighted, lambdas = [], []
for w in (1, 2):
    def times(n, *, by=w, of=LIMIT, more=w + 1):  # which is asked for by its number
        return n * by + more + len(of)
    weighted.append(times)
    lambdas.append(lambda n, by=w: n * by)

API_KEY = "sk-0123456789"
HEADERS = {"headers": {"x": "0123456789"}}

def judged(text):
    return len(API_KEY + text)

def counter():
    count = 0
    def counted(text):
        nonlocal count
        count += 1
        return count
    return counted

counted = counter()

def sent(text):
    return len(HEADERS) + len(text)
"""


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """Names of a script that was run as the main program."""
    (tmp_path / "script.py").write_text(SCRIPT)
    linecache.checkcache()
    return runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")


def imported(text: str, name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "<written>", "exec"), names)
    return names[name]


def test_a_function_comes_with_imports_constants_and_other_functions(script: dict[str, Any]):
    text = module_text({"uses_all": script["uses_all"]})
    assert "import math as m" in text
    assert "SCRIPT" not in text
    for words in ("", "a b a", "One two"):
        assert imported(text, "uses_all")(words) == script["uses_all"](words)


def test_functions_that_call_each_other_are_written_once(script: dict[str, Any]):
    text = module_text({"even": script["even"], "odd": script["odd"]})
    assert text.count("def even") == text.count("def odd") == 1
    assert imported(text, "even")(4) is True


def test_a_closure_keeps_its_value_and_its_new_name(script: dict[str, Any]):
    assert imported(module_text({"three": script["plus_three"]}), "three")(4) == 7


@pytest.mark.parametrize("number", [0, 1])
def test_defaults_are_those_of_the_definition(script: dict[str, Any], number: int):
    for name in ("weighted", "lambdas"):
        function = script[name][number]
        again = imported(module_text({"times": function}), "times")
        assert [again(n) for n in (0, 5)] == [function(n) for n in (0, 5)], name


def test_defaults_that_were_set_later_have_no_source(script: dict[str, Any]):
    script["lambdas"][0].__defaults__ = ()
    with pytest.raises(NoSource, match="the defaults of `times`"):
        module_text({"times": script["lambdas"][0]})


def test_two_lambdas_of_a_line_are_told_apart(script: dict[str, Any]):
    assert imported(module_text({"one": script["first"]}), "one")(1) == 2
    assert imported(module_text({"one": script["second"]}), "one")(1) == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("reads", "`opened` is an object"),
        ("misspelt", "`no_such_name`"),
        ("judged", "`API_KEY` is a secret"),
        ("counted", "`counted` changes a variable of the function around it"),
        ("sent", "`HEADERS` is a secret"),
    ],
)
def test_what_has_no_source_is_named(script: dict[str, Any], name: str, why: str):
    with pytest.raises(NoSource, match=why):
        module_text({name: script[name]})


def test_what_a_function_changes_is_state_and_no_part_of_its_source(script: dict[str, Any]):
    before = module_text({"counts": script["counts"]})
    script["counts"]("")
    assert module_text({"counts": script["counts"]}) == before
    assert imported(before, "counts")("") == (1, 1, [3])


def test_two_closures_of_one_definition_keep_their_own_values(script: dict[str, Any]):
    text = module_text({"three": script["plus_three"], "five": script["made"](5)})
    assert [imported(text, name)(4) for name in ("three", "five")] == [7, 9]


def test_one_name_cannot_stand_for_two_objects(tmp_path: Path):
    (tmp_path / "two").mkdir()
    one = run_as_script(tmp_path, "k = 1\ndef f(x):\n    return x + k\n")["f"]
    other = run_as_script(tmp_path / "two", "k = 2\ndef g(x):\n    return x * k\n")["g"]
    with pytest.raises(NoSource, match="`k` stands for two different objects"):
        module_text({"f": one, "g": other})


def test_the_process_that_has_an_object_calls_the_object(script: dict[str, Any], tmp_path: Path):
    members = {"even": script["even"]}
    file = write_objects(tmp_path / "inputs", "reward", members, live=members)
    assert file.absent is None
    assert load_function(str(file.path), "even", field="reward") is script["even"]
    again = write_objects(tmp_path / "inputs", "reward", members, live=members)
    assert again.path == file.path


def test_an_object_without_source_is_absent_elsewhere(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    members = {"reads": script["reads"]}
    file = write_objects(tmp_path, "reward", members, live=members)
    assert file.absent is not None
    assert absent_object(str(file.path)) == "reads"
    assert is_loaded(str(file.path))
    elsewhere = tmp_path / "moved" / file.path.name
    elsewhere.parent.mkdir()
    elsewhere.write_text(file.path.read_text())
    assert not is_loaded(str(elsewhere))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"give it again: luyen\.train"):
        load_function(str(elsewhere), "reads", field="reward")


# What is written computes what the object computes, or the object has no source.


def run_as_script(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "one.py").write_text(text)
    linecache.checkcache()
    return runpy.run_path(str(tmp_path / "one.py"), run_name="__main__")


def test_a_file_that_has_changed_since_is_not_the_source(tmp_path: Path):
    function = run_as_script(tmp_path, "def f(n):\n    return n + 1\n")["f"]
    assert imported(module_text({"f": function}), "f")(1) == 2
    for later in ("def f(n):\n    return n + 2\n", "\n\ndef g(m):\n    return m + 1\n"):
        (tmp_path / "one.py").write_text(later)
        linecache.checkcache()
        with pytest.raises(NoSource):
            module_text({"f": function})


WRAPPERS = """
import functools
def times(k):
    def around(g):
        @functools.wraps(g)
        def h(n):
            return k * g(n)
        return h
    return around
K = 2
"""
BOUND_AGAIN = WRAPPERS + "@times(K)\ndef f(n):\n    return n\nK = 5\n"
WRAPPED_AGAIN = WRAPPERS + "@times(2)\ndef f(n):\n    return n\nf = times(3)(f)\n"
DECORATOR_REPLACED = WRAPPERS + (
    "@times(2)\ndef f(n):\n    return n\ndef times(k):\n    return lambda g: g\n"
)
WRAPPED = """
import functools
def plain(n):
    return n
@functools.wraps(plain)
def f(n):
    return 2 * plain(n)
def other(n):
    return n
f.__wrapped__ = other
"""
SHADOWED = """
t = [1, 2]
def f(n):
    def g(t):
        t.append(n)
    g([])
    return t
"""
NONLOCAL = """
def made():
    n = 0
    def f(_):
        nonlocal n
        n += 1
        return n
    return f
f = made()
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(n):\n    return f.by * n\nf.by = 3\n", "has attributes"),
        ("w = object()\ndef f(n, by=w):\n    return n\nw = 0\n", "the default `w` of `f`"),
        ("k = 4\ndef f(n):\n    return globals().get('k', 0)\n", "`globals`"),
        ("k = 4\ndef f(n):\n    return eval('k')\n", "`eval`"),
        (SHADOWED, "`t` in `f`"),
        (NONLOCAL, "changes a variable"),
        (WRAPPED, "wrapped by what its source does not name"),
        ("def f(n, *, k=3):\n    return k\nf.__kwdefaults__ = None\n", "the defaults of `f`"),
        ("def f(n):\n    return [1][n]\nf = lambda n, f=f: f(n)\n", "the default `f`"),
    ],
)
def test_what_the_source_does_not_show_has_none(tmp_path: Path, text: str, why: str):
    function = run_as_script(tmp_path, text)["f"]
    with pytest.raises(NoSource, match=why):
        module_text({"f": function})


DECORATED = """
def twice(g):
    def h(n):
        return 2 * g(n)
    return h
@twice
def f(n):
    return n
"""
CLASS = """
from dataclasses import dataclass, field
@dataclass(frozen=True)
class Point:
    x: int
    y: int = 3
    more: list = field(default_factory=list)
    def total(self):
        return self.x + self.y + len(self.more)
class Sums:
    by = 3
    table = [1, 2]
    size: int = 2 * 3
    def __hidden(self):
        return 0
    @property
    def twice(self):
        return 2 * self.by + self.__hidden()
    @staticmethod
    def least(n):
        return n
    def plus(self, n):
        return n + self.by
def f(n):
    return Sums().plus(n) + Point(-3).total()
"""
GIVEN = """
import contextlib
@contextlib.contextmanager
def given(n):
    yield n
def f(n):
    with given(n) as x:
        return x
"""
RECURSIVE = """
def made():
    def f(n):
        return 1 if n < 2 else n * f(n - 1)
    return f
f = made()
"""
DEFAULTS = """
def f(n, by=1, *, to=2):
    return by, to
f.__defaults__ = (5,)
f.__kwdefaults__["to"] = 7
"""
DOCUMENTED = '''
from __future__ import annotations
import os.path as p
def f(n: int) -> str:
    """One.

    Two.
    """
    return p.join("a", str(n))
'''


@pytest.mark.parametrize(
    "text",
    [
        "v = float('nan')\ndef f(n, by=v):\n    return by\nv = 0\n",
        "v = float('-inf')\ndef f(n):\n    return v\n",
        "def g(n):\n    return 2 * n\ndef f(n):\n    return n\nf.__code__ = g.__code__\n",
        "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\n",
        WRAPPERS + "@times(2)\n@times(3)\ndef f(n):\n    return n\n",
        "def f(n):\n    match n:\n        case 5: return 'five'\n        case [a, *b]: return a\n",
        GIVEN,
        RECURSIVE,
        BOUND_AGAIN,
        WRAPPED_AGAIN,
        DECORATOR_REPLACED,
        DEFAULTS,
        DECORATED,
        DOCUMENTED,
    ],
)
def test_what_is_written_computes_the_same(tmp_path: Path, text: str):
    function = run_as_script(tmp_path, text)["f"]
    again = imported(module_text({"f": function}), "f")
    assert repr(again(5)) == repr(function(5))


@pytest.mark.parametrize(
    "change",
    [
        "Sums.by = 4",
        "Sums.plus = lambda self, n: 0",
        "Sums.more = 1",
        "Sums.table.append(3)",
        "Sums.size = 7",
        "Sums.twice = property(lambda self: 9)",
        "del Sums.by",
    ],
)
def test_a_class_that_was_changed_is_not_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sums_script.py").write_text(CLASS)
    names: dict[str, Any] = vars(importlib.import_module("sums_script"))
    for name in ("Sums", "Point", "f"):
        names[name].__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", sys.modules.pop("sums_script"))
    assert imported(module_text({"f": names["f"]}), "f")(1) == 4
    exec(change, names)
    with pytest.raises(NoSource, match="has changed"):
        module_text({"f": names["f"]})
