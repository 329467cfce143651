"""Every example of every page runs, and prints what the page says."""

import doctest
import io
import os
import re
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from unittest import mock

import pytest

from luyen.cli.main import run
from tests.architecture.pages import blocks, pages
from tests.architecture.tree import ROOT

PAGES = dict(pages())
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def run_python(body: str) -> str:
    """What is wrong with a Python block: an example that prints something else, or nothing."""
    if body.startswith("# not run"):
        return ""
    if ">>>" not in body:
        exec(compile(body, "<page>", "exec"), {"__name__": "page"})
        return ""
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(body, {}, "page", None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


def run_console(body: str) -> str:
    """What a console block should have said, where it differs; only `luyen` commands are run."""
    wrong: list[str] = []
    for entry in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, expected = entry.partition("\n")
        if not command.startswith("luyen "):
            continue
        said = said_by(shlex.split(command, comments=True))
        if not doctest.OutputChecker().check_output(expected, said, doctest.ELLIPSIS):
            wrong.append(f"$ {command}\n{said}")
    return "\n".join(wrong)


def said_by(words: list[str]) -> str:
    """What a command prints, run in this process, which has loaded all that it needs."""
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, PLAIN),
        mock.patch.object(sys, "argv", words),
        chdir(ROOT),
        redirect_stdout(said),
        redirect_stderr(said),
        suppress(SystemExit),
    ):
        run()
    return said.getvalue()


@pytest.mark.parametrize("path", PAGES)
def test_every_example_of_a_page_is_true(path: str):
    assert [said for b in blocks(PAGES[path], "python") if (said := run_python(b))] == []
    assert [said for b in blocks(PAGES[path], "console") if (said := run_console(b))] == []


def test_a_false_example_is_caught():
    assert "Expected" in run_python(">>> 1 + 1\n3\n")
    assert run_python(">>> 1 + 1\n2\n") == ""
    with pytest.raises(ZeroDivisionError):
        run_python("1 / 0")
    assert run_python("# not run: needs a cluster\n1 / 0") == ""
    assert "Usage" in run_console("$ luyen --help\nnonsense\n")
    assert run_console("$ luyen --help\n...\n") == ""
