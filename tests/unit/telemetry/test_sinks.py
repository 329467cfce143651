"""Metrics reach every sink; the file of two equal runs differs in times alone."""

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.telemetry.display import PlainDisplay, SilentDisplay
from luyen.telemetry.metrics import CATALOG, UncataloguedMetric, metric, read_metrics, series
from luyen.telemetry.remote_sinks import MlflowSink, RunIdentity, missing_packages
from luyen.telemetry.rollout_tables import COLUMNS, RolloutTable
from luyen.telemetry.sinks import JsonlSink, MetricLog, open_sinks
from luyen.telemetry.spans import SPANS

metric("probe/mean", doc="A number of these tests.")
metric("probe/pass@<k>", doc="A number of these tests.")
WHO = RunIdentity(run_id="r1", project="p", experiment="e", config={"trainer": {"seed": 0}})


ROW = (1, "1+1=", "2", 1.0, "answered", None, 0, 2)


def table_of(step: int) -> RolloutTable:
    return RolloutTable(name="rollouts/train", step=step, rows=(ROW,))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config="", provenance={}, manifest={})


def test_a_line_has_sorted_keys_and_exact_floats(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"b": 0.1 + 0.2, "a": 3, "c": math.nan})
    sink.close()
    text = path.read_text()
    values = '{"a": 3.0, "b": 0.30000000000000004, "c": "nan", '
    assert text == values + f'"check": "{json.loads(text)["check"]}", "step": 1}}\n'
    [step] = read_metrics(path)
    assert step.values["b"] == 0.1 + 0.2
    assert math.isnan(step.values["c"])


def test_a_line_is_on_the_disk_before_the_next_step(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(0, {"a": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    sink.close()


def test_a_step_is_written_once(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {})
    with pytest.raises(AssertionError, match="step 3 was written after step 3"):
        sink.write(3, {})
    sink.close()


def test_a_resumed_run_writes_the_same_file_as_an_uninterrupted_one(tmp_path: Path):
    def session(path: Path, steps: range) -> None:
        sink = JsonlSink(path, first_step=steps.start)
        for step in steps:
            sink.write(step, {"a": 1 / (step + 1)})
        sink.close()

    session(tmp_path / "whole.jsonl", range(0, 9))
    session(tmp_path / "killed.jsonl", range(0, 7))
    with (tmp_path / "killed.jsonl").open("a") as file:
        file.write('{"a": 0.1')  # power was lost in the middle of a line
    session(tmp_path / "killed.jsonl", range(5, 9))
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "killed.jsonl").read_bytes()


def test_two_equal_runs_differ_in_times_alone(tmp_path: Path):
    for name in ("a", "b"):
        run = RunDirectory.create(tmp_path / name, config="", provenance={}, manifest={})
        log = open_sinks(["jsonl"], directory=run, identity=WHO, display=SilentDisplay())
        for step in range(3):
            with SPANS.span("generate", step=step):
                pass
            log.write(step, {"probe/mean": step / 3})
        log.close()
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("a", "b"))
    assert all(step.values["time/generate"] >= 0 for step in a)
    assert [s.timeless() for s in a] == [s.timeless() for s in b]
    assert [s.timeless() for s in a] == [{"probe/mean": step / 3} for step in range(3)]
    assert series(a, "probe/mean") == ([0, 1, 2], [0.0, 1 / 3, 2 / 3])


def test_every_local_sink_gets_every_step(run: RunDirectory):
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.start(2)
    names = ["console", "jsonl", "tensorboard"]
    log = open_sinks(names, directory=run, identity=WHO, display=display)
    for step in (1, 2):
        log.rollouts(table_of(step))
        log.write(step, {"probe/mean": 0.5})
    log.rollouts(None)
    log.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert [s.step for s in read_metrics(run.metrics)] == [1, 2]
    [file] = run.tensorboard.iterdir()
    assert file.read_bytes().count(b"probe/mean") == 2
    assert file.read_bytes().count(b"rollouts/train") == 2


def test_an_undeclared_metric_fails_under_the_tests():
    assert CATALOG.missing(["probe/nonsense"]) == ["probe/nonsense"]
    with pytest.raises(UncataloguedMetric, match="probe/nonsense"):
        MetricLog([]).write(0, {"probe/nonsense": 1.0})


def test_a_sink_without_its_package_is_refused_at_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"trainer\.logger = 'wandb'.*pip install"):
        open_sinks(["wandb"], directory=run, identity=WHO, display=SilentDisplay())


class Scripted:
    """Stands in for a remote run: notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            self.calls.append((name, words, named))
            return self

        return call


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: object())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_remote_run_is_resumed_logged_and_finished(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
):
    remote = Scripted()
    SPANS.drain(4)  # what other tests left
    install(monkeypatch, name, init=remote.init, Table=lambda **given: given)
    log = open_sinks([name], directory=run, identity=WHO, display=SilentDisplay())
    log.rollouts(table_of(4))
    log.write(4, {"probe/mean": 0.25})
    log.close()
    begun = remote.calls[0][2]
    assert (begun["project"], begun["resume"]) == ("p", "allow")
    assert begun["config"] == {"trainer": {"seed": 0}}
    assert begun.get("id", begun["name"]).endswith("r1")
    shown, numbers = [call for call in remote.calls if call[0] == "log"]
    assert shown[1] == ({"rollouts/train": {"columns": list(COLUMNS), "data": [list(ROW)]}},)
    assert numbers == ("log", ({"probe/mean": 0.25},), {"step": 4})
    assert remote.calls[-1][0] == "finish"


class Tracker:
    """The part of MLflow's client that the sink uses, in memory."""

    runs: list[Any]

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.ended: list[str] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if type(self).runs else None

    def create_experiment(self, name: str) -> str:
        return "7"

    def search_runs(self, places: list[str], query: str) -> list[Any]:
        return type(self).runs if "'r1'" in query else []

    def create_run(self, place: str, tags: dict[str, str]) -> Any:
        made = SimpleNamespace(info=SimpleNamespace(run_id="x9"))
        type(self).runs.append(made)
        return made

    def log_batch(self, run_id: str, **what: Any) -> None:
        self.batches.append({"run": run_id, **what})

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(run_id)


def test_mlflow_takes_a_run_up_again_and_gets_names_it_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Tracker.runs = []
    install(monkeypatch, "mlflow", MlflowClient=Tracker)
    install(monkeypatch, "mlflow.entities", Metric=lambda *m: m, Param=lambda *p: p)
    first = MlflowSink(WHO, tmp_path)
    first.write(2, {"probe/pass@4": 0.5})
    first.close()
    client = vars(first)["_client"]
    params, metrics = client.batches
    assert params == {"run": "x9", "params": [("trainer.seed", "0")]}
    [(name, value, _, step)] = metrics["metrics"]
    assert (name, value, step) == ("probe/pass_4", 0.5, 2)
    assert client.ended == ["x9"]
    second = MlflowSink(WHO, tmp_path)
    assert vars(second)["_client"].batches == [], "a resumed run has its parameters already"


def test_no_remote_package_is_imported_before_it_is_asked_for():
    assert not {"wandb", "mlflow", "trackio"} & sys.modules.keys()


def test_a_metrics_file_is_plain_json(tmp_path: Path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(0, {"a": math.inf, "b": -math.inf})
    sink.close()

    def refuse(word: str) -> float:
        raise AssertionError(word)

    text = (tmp_path / "m.jsonl").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert (found["a"], found["b"], found["step"]) == ("inf", "-inf", 0)


def test_any_flipped_bit_of_a_line_is_found(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.25, "time/step": 1.5, "val/x": math.nan})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    content, was = path.read_bytes(), repr(read_metrics(path))
    for place in range(8 * content.index(b"\n")):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found, said = repr(read_metrics(path)), "metrics.jsonl line 1"
        except UserError as error:
            found, said = was, str(error)
        assert found == was, f"bit {place} changed a number"
        assert {"metrics.jsonl", "line 1"} == {w for w in ("metrics.jsonl", "line 1") if w in said}


@pytest.mark.parametrize(
    ("store", "lacking"),
    [("", "sqlalchemy"), ("postgresql+psycopg2://db", "sqlalchemy"), ("https://mlflow", None)],
)
def test_mlflow_needs_what_its_store_needs(
    store: str, lacking: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    found = missing_packages("mlflow", lambda package: package != "sqlalchemy")
    if lacking is None:
        assert found is None
    else:
        assert found is not None
        assert lacking in found[0]
        assert 'pip install "luyen[mlflow]"' in found[1]
