"""A long wait is explained once, a short one not at all."""

from functools import partial
from threading import Event

import pytest

from luyen.telemetry.display import SilentDisplay
from luyen.telemetry.progress import explain_if_slow
from luyen.train.builders import setup
from tests.runs import report_of


def test_a_block_that_goes_on_is_explained_once():
    said: list[str] = []
    spoken = Event()

    def say(words: str) -> None:
        said.append(words)
        spoken.set()

    with explain_if_slow(say, "reading", after_s=0.01):
        assert spoken.wait(10)
    assert said == ["reading"]


def test_a_quick_block_and_one_that_fails_are_not():
    said: list[str] = []
    with explain_if_slow(said.append, "reading", after_s=60):
        pass
    with pytest.raises(KeyError), explain_if_slow(said.append, "reading", after_s=60):
        raise KeyError
    assert said == []


def test_a_run_says_that_it_prepares_rows(tmp_path, monkeypatch: pytest.MonkeyPatch):
    spoken, found = Event(), object()
    said: list[str] = []
    display = SilentDisplay()

    def say(words: str) -> None:
        said.append(words)
        spoken.set()

    def slow(*_: object, **__: object) -> object:
        assert spoken.wait(10)
        return found

    monkeypatch.setattr(display, "waiting", say)
    monkeypatch.setattr(setup, "build_data", slow)
    monkeypatch.setattr(setup, "explain_if_slow", partial(explain_if_slow, after_s=0.01))
    config = report_of(tmp_path).config
    assert setup.load_rows(config, None, display) is found  # pyright: ignore[reportArgumentType]
    assert len(said) == 1
    assert said[0].startswith("preparing rows")
