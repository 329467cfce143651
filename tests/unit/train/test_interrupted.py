"""A signal in any phase ends a run soon; what is done is saved, and goes on to the same chain."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.rewards.build import BuiltReward
from luyen.runtime.in_process import SharedRollout
from luyen.telemetry.progress import PROGRESS
from luyen.telemetry.summary import RunSummary
from luyen.train import loop, session
from luyen.train.offline.sft import SftStage
from luyen.train.start import run_training
from tests.runs import report_of

VALIDATED = (
    "data.val_files=arithmetic://sum?digits=2&split=held-out&size=8",
    "trainer.total_training_steps=4",
    "trainer.test_freq=2",
    "trainer.save_freq=100",
)
SFT = (
    "trainer.stage=sft",
    "data.train_files=arithmetic://sum?digits=1&size=32&traces=1",
    "data.val_files=arithmetic://sum?digits=1&split=held-out&traces=1",
)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(session, "plot_curves", lambda *_: [])
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before, "every handler is put back"


def train(folder: Path, *words: str) -> RunSummary:
    return run_training(report_of(folder, *VALIDATED, *words))


def chain(folder: Path) -> list[str]:
    return [line.chain for line in read_digests(folder / "luyen" / "run" / "digests.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "plot_curves", lambda *_: [])
        train(folder)
    return chain(folder)


def nth(number: int, act: Callable[..., object], kind: signal.Signals) -> Callable[..., object]:
    """`act`, with a signal in its call of this number; a slow one, which nobody waits for."""
    calls = iter(range(1, 1_000))

    def acting(*values: object, **named: object) -> object:
        if next(calls) == number:
            signal.raise_signal(kind)
            time.sleep(20)  # not reached where the phase is given up
        return act(*values, **named)

    return acting


CASES = {
    "the first validation is generated": (SharedRollout, "generate", 1, None),
    "the first validation is scored": (BuiltReward, "score", 1, None),
    "the second step is generated": (SharedRollout, "generate", 3, 1),
    "the second step is scored": (BuiltReward, "score", 3, 1),
    "a later validation is generated": (SharedRollout, "generate", 4, 2),
    "a later validation is scored": (BuiltReward, "score", 4, 2),
    "the last validation is generated": (SharedRollout, "generate", 7, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_stops_soon_and_the_run_goes_on_as_if_nothing_had_happened(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[str]
):
    owner, name, call, saved = CASES[case]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, nth(call, getattr(owner, name), signal.SIGINT))
        began = time.monotonic()
        summary = train(tmp_path)
        assert time.monotonic() - began < 20
    assert (summary.headline, summary.exit_code) == ("Interrupted", 130)
    folders = sorted(path.name for path in tmp_path.glob("luyen/run/checkpoints/step_*"))
    assert folders == ([] if saved is None else [f"step_{saved:06d}"])
    assert train(tmp_path).exit_code == 0
    assert chain(tmp_path) == undisturbed
    assert not list(tmp_path.glob("luyen/run/journal/*"))


def test_an_update_is_carried_to_its_end_and_its_validation_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[str]
):
    with monkeypatch.context() as patched:
        calls = iter(range(1, 100))

        def updating(*values: object) -> object:
            if next(calls) == 2:
                signal.raise_signal(signal.SIGTERM)
            return known(*values)  # pyright: ignore[reportArgumentType]

        known = loop.start_update
        patched.setattr(loop, "start_update", updating)
        summary = train(tmp_path)
    assert summary.exit_code == 143
    assert (tmp_path / "luyen/run/checkpoints/step_000002").is_dir()
    assert len(chain(tmp_path)) == 2, "step 0 and step 1: the second one lacks its validation"
    assert train(tmp_path).exit_code == 0
    assert chain(tmp_path) == undisturbed


@pytest.mark.parametrize(("call", "saved"), [(1, []), (2, ["step_000002"])])
def test_an_offline_run_stops_in_its_validation(
    call: int, saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(tmp_path / "whole", *SFT)
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        patched.setattr(SftStage, "measure", nth(call, SftStage.measure, signal.SIGINT))
        assert train(folder, *SFT).exit_code == 130
    assert sorted(path.name for path in folder.glob("luyen/run/checkpoints/step_*")) == saved
    assert train(folder, *SFT).exit_code == 0
    assert chain(folder) == chain(tmp_path / "whole")


def test_a_validation_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, int, int]] = []

    def judge(*values: object) -> object:
        seen.append(("judged", 0, 0))
        return known(*values)  # pyright: ignore[reportArgumentType]

    def add(name: str, step: int, count: int = 1) -> None:
        count_up(name, step, count)
        now = PROGRESS.now()
        seen.extend([(now.name, now.done, now.total)] if now is not None else [])

    known, count_up = BuiltReward.score, PROGRESS.add
    monkeypatch.setattr(BuiltReward, "score", judge)
    monkeypatch.setattr(PROGRESS, "add", add)
    train(tmp_path, "trainer.total_training_steps=1")
    drawn = seen[: seen.index(("judged", 0, 0))]
    assert drawn == [("validation", done, 8) for done in range(1, 9)]
    assert ("rollout", 16, 16) in seen
    assert ("score", 8, 8) in seen
