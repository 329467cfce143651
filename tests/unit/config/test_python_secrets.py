"""No secret that a name, a shape or the environment shows is written into the files of a run."""

import linecache
import runpy
from pathlib import Path
from typing import Any

import pytest

from luyen.config.objects.object_source import module_text
from luyen.config.python_objects import write_objects


def run_as_script(folder: Path, text: str) -> dict[str, Any]:
    (folder / "script.py").write_text(text)
    linecache.checkcache()
    return runpy.run_path(str(folder / "script.py"), run_name="__main__")


SECRET_DEFAULTS = """
import os
SETTINGS = {"api_key": "abcdefgh", "size": 3}
PLAIN = os.environ["SOME_HOST_OF_OURS"]

def by_argument(text, api_key=os.environ["SOME_HOST_OF_OURS"]):
    return len(api_key)

def by_word(text, *, key=SETTINGS["api_key"]):
    return len(key)

def by_value(text, key=os.environ["SOME_HOST_OF_OURS"].strip()):
    return len(key)

def by_constant(text):
    return len(PLAIN)

def harmless(text, most=SETTINGS["size"]):
    return most
"""


@pytest.mark.parametrize("name", ["by_argument", "by_word", "by_value", "by_constant"])
def test_a_secret_default_is_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv("SOME_HOST_OF_OURS", "sk-0123456789abcdef")
    names = run_as_script(tmp_path, SECRET_DEFAULTS)
    file = write_objects(tmp_path / name, "reward", {name: names[name]}, live={name: names[name]})
    written = file.path.read_text()
    assert "sk-0123456789abcdef" not in written
    assert "abcdefgh" not in written
    assert "is a secret" in (file.absent or "")
    assert "most=3" in module_text({"harmless": names["harmless"]})


KEY = "hunter2hunter2"
SHAPED = "sk-0123456789abcdefghijABCDEFGHIJ"
HIDDEN = [
    f"def f(n, api_key='{KEY}'):\n    return n\n",
    f"def f(n, *, password='{KEY}'):\n    return n\n",
    f"x = '{KEY}'\ndef f(n, token=x):\n    return n\nx = ''\n",
    f"def f(n):\n    api_key: str = '{KEY}'\n    return n\n",
    f"def f(n):\n    user, password = 'me', '{KEY}'\n    return n\n",
    f"def f(n):\n    return dict(Authorization='Bearer {KEY}')\n",
    f"def f(n):\n    return {{'headers': {{'x': '{KEY}'}}}}\n",
    f"def f(n):\n    return [('Authorization', '{KEY}')]\n",
    f"def f(n):\n    return len('https://me:{KEY}@host/')\n",
    f"def f(n):\n    'Uses api_key={KEY}.'\n    return n\n",
    f"def f(n):\n    return n.setdefault('Authorization', 'Bearer {KEY}')\n",
    f"import os\ndef f(n):\n    return os.environ.get('API_KEY', '{KEY}')\n",
    f"def f(n):\n    api_key = '{KEY}' if n else ''.join(['{KEY}'])\n    return api_key\n",
    f"def api_key():\n    return '{KEY}'\ndef f(n):\n    return api_key()\n",
    f"def f(n):\n    # password: {KEY}\n    return n\n",
    f"API_KEY = b'{KEY}'\ndef f(n):\n    return API_KEY\n",
    f"def f(n):\n    return len('{SHAPED}')\n",
    f"import threading\nk = threading.Lock()\ndef f(n, password='{KEY}'):\n    return str(k)\n",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_no_file_holds_a_secret_that_a_name_or_a_shape_shows(tmp_path: Path, text: str):
    function = run_as_script(tmp_path, text)["f"]
    file = write_objects(tmp_path / "inputs", "reward", {"f": function}, live={"f": function})
    assert file.absent is not None
    written = file.path.read_text()
    assert KEY not in written
    assert SHAPED not in written
    assert file.path.stat().st_mode & 0o77 == 0


def test_no_file_holds_a_value_of_a_secret_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    function = run_as_script(tmp_path, "x = 'plainword9'\ndef f(n):\n    return len(x)\n")["f"]
    assert "plainword9" in module_text({"f": function})
    monkeypatch.setenv("JUDGE_TOKEN", "plainword9")
    file = write_objects(tmp_path / "inputs", "reward", {"f": function}, live={"f": function})
    assert "plainword9" not in file.path.read_text()


FROM_ENVIRONMENT = '''
import os
def f(n, token=None):
    """Score.

    token: the mark of an end.
    """
    api_key = os.environ["API_KEY"]
    return [api_key, token, n.eos_token == "</s>"]
'''


def test_a_function_that_reads_its_secret_from_the_environment_is_written(tmp_path: Path):
    function = run_as_script(tmp_path, FROM_ENVIRONMENT)["f"]
    file = write_objects(tmp_path / "inputs", "reward", {"f": function}, live={"f": function})
    assert file.absent is None
