"""What is written of a function computes the same in another process; all other forms stay."""

import builtins
import collections
import json
import linecache
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luyen.base.source_files import MOST_CHARACTERS, NoSource
from luyen.config.objects.object_source import module_text

HEAD = "import json, math, re, functools\nfrom collections import Counter\n"
CLASSES = """
class S:
    by = 3
    def m(self, n=2):
        return n * self.by
class E(Exception):
    def __len__(self):
        return 4
from dataclasses import dataclass, field
@dataclass
class P:
    x: int
    z: list = field(default_factory=list)
def f(n):
    return S().m(n), bool(S()), len(E()), repr(P(n)), P(1) == P(1)
"""
WRAPPED = """
def times(k):
    def around(g):
        @functools.wraps(g)
        def h(n):
            return k * g(n)
        return h
    return around
@times(2)
def f(n, q=1):
    return n + q
"""
OWN = "K = 1\ndef helper():\n    return 'h'\ndef val():\n    return K, helper()\n"


@pytest.fixture(autouse=True)
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Libraries that are as they were afterwards, and a module of one's own on the path."""
    (tmp_path / "module_of_ours.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = [(one, dict(vars(one))) for one in (builtins, json, math)]
    most_common = collections.Counter.most_common
    yield
    for one, names in kept:
        vars(one).update(names)
    setattr(collections.Counter, "most_common", most_common)  # noqa: B010
    sys.modules.pop("module_of_ours", None)


def function_of(folder: Path, text: str, change: str = "") -> Any:
    """`f` of a script, after what the script did later, which its text does not show."""
    script = folder / "script.py"
    script.write_text(HEAD + text)
    linecache.checkcache()
    names = runpy.run_path(str(script), run_name="__main__")
    home = names["f"].__globals__
    home["later"] = names
    home.update({name: one for name, one in names.items() if name not in home})
    exec(compile(change, "<later>", "exec"), home)
    return home["f"]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("def f(n):\n    return oct(n)", "import builtins; builtins.oct = lambda n: 9"),
        ("def f(n):\n    return math.sqrt(n)", "math.sqrt = lambda n: 1.0"),
        (
            "def f(n):\n    return json.dumps(n)",
            "json.dumps = functools.wraps(json.dumps)(lambda n: 'no')",
        ),
        ("def f(n):\n    return Counter([n])", "Counter.most_common = lambda self: 1"),
        (
            "def f(n):\n    return Counter([n])",
            "import collections as c; names = {}\n"
            "exec(compile('def g(self): return 9', c.__file__, 'exec'), names)\n"
            "Counter.most_common = names['g']",
        ),
        ("def f(n):\n    return Counter([n])", "Counter.most_common = property(lambda self: 1)"),
        ("def f(n):\n    m = math\n    return m.sqrt(n)", ""),
        ("def f(n):\n    return getattr(math, 'sqrt')(n)", ""),
        ("z = 4\ndef f(n):\n    return f.__globals__['z']", ""),
        ("z = 4\ndef f(n):\n    import __main__\n    return __main__.z", ""),
        ("import sys\nz = 4\ndef f(n):\n    return sys._getframe().f_globals['z']", ""),
        ("def f(n):\n    return __name__", ""),
        ("k = 1\ndef g():\n    global k\n    k += 1\ndef f(n):\n    return k", "g()"),
        ("k = [1]\ndef g():\n    k.append(2)\ndef f(n):\n    return len(k)", "g()"),
        ("k = {'a': [1]}\ndef f(n):\n    a = k['a']\n    a.append(n)\n    return a", "f(1)"),
        ("def f(n, k=[]):\n    k.append(n)\n    return len(k)", "f(1)"),
        ("class T(str):\n    pass\nk = [T('a')]\ndef f(n):\n    return 'a' in k", ""),
        ("def f(n: int):\n    return n", "f.__annotations__['n'] = str"),
        ("def f(n):\n    'one'\n    return n", "f.__doc__ = 'two'"),
        ("def f(n):\n    return 5", "f.__code__ = f.__code__.replace(co_consts=(None, 6))"),
        ("_made_1 = len\ndef f(n):\n    return _made_1([n])", ""),
        (CLASSES, "S.by = 4"),
        (CLASSES, "S.__bool__ = lambda self: False"),
        (CLASSES, "S.m.__defaults__ = (5,)"),
        (CLASSES, "S.__getattribute__ = lambda self, name: lambda *a: 1"),
        (CLASSES, "E.__len__ = lambda self: 9"),
        (CLASSES, "P.__repr__ = lambda self: 'x'"),
        (CLASSES, "P.__eq__ = lambda self, other: False"),
        (WRAPPED, "f.__wrapped__.__code__ = (lambda n, q=1: 3).__code__"),
        (
            "import module_of_ours\ndef f(n):\n    return module_of_ours.val()",
            "module_of_ours.helper = lambda: 'p'",
        ),
        (
            "import module_of_ours\ndef f(n):\n    return module_of_ours.val()",
            "module_of_ours.K = 55",
        ),
        ("T = '" + "a" * MOST_CHARACTERS + "'\ndef f(n):\n    return len(T)", ""),
    ],
)
def test_what_the_text_does_not_show_stays_in_its_process(tmp_path: Path, text: str, change: str):
    function = function_of(tmp_path, text, change)
    with pytest.raises(NoSource):
        module_text({"f": function})


SAME = [
    (CLASSES, ""),
    (WRAPPED, ""),
    (WRAPPED, "f.__closure__[1].cell_contents = 50"),
    (WRAPPED, "times = None"),
    ("k = 1\ndef f(n):\n    return k", "k = 5"),
    ("def f(n):\n    match n:\n        case 5: return 'five'\n        case _: return 0", ""),
    ("def f(n):\n    try: return 1 / n\n    except ValueError: return 2\n    finally: pass", ""),
    ("from typing import Optional\ndef f(n: Optional[int]) -> Optional[int]:\n    return n", ""),
    ("WORDS = set('a b'.split())\ndef f(n):\n    return 'a' in WORDS", ""),
    ("WORDS = frozenset(['a'])\ndef f(n):\n    return 'a' in WORDS", ""),
    ("re = 4\nimport re as r\nzz = r.compile('a+')\ndef f(n):\n    return re, zz.findall('a')", ""),
    ("from module_of_ours import val\ndef f(n):\n    return val()", ""),
    ("def made():\n    def f(n):\n        return '''a\n  b'''\n    return f\nf = made()", ""),
    ("import xml.dom.minidom\ndef f(n):\n    return xml.dom.minidom.Node.TEXT_NODE", ""),
]
IN_ANOTHER = """
import json, sys
sys.path.insert(0, sys.argv[2])
names = {"__name__": "written"}
exec(compile(open(sys.argv[1]).read(), "written", "exec"), names)
print(repr(names["f"](5)))
"""


@pytest.mark.parametrize(("text", "change"), SAME)
def test_what_is_written_computes_the_same_in_another_process(
    tmp_path: Path, text: str, change: str
):
    function = function_of(tmp_path, text, change)
    (tmp_path / "written.py").write_text(module_text({"f": function}))
    line = [sys.executable, "-I", "-c", IN_ANOTHER, str(tmp_path / "written.py"), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == repr(function(5)), done.stderr


def test_names_that_the_rest_of_a_file_has_are_not_taken(tmp_path: Path):
    function = function_of(
        tmp_path, "def _combined(n):\n    return n\ndef f(n):\n    return _combined(n)"
    )
    assert "_combined" in module_text({"f": function})
    with pytest.raises(NoSource, match="a name that its file has already"):
        module_text({"f": function}, taken={"_combined"})
