"""Checkpoints are made beside training from the state of their step, or the run says why not."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from luyen.base.errors import UserError
from luyen.checkpoint.file_writers import Staging
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state, not_finite
from luyen.checkpoint.writer import CheckpointWriter
from luyen.config.plan import Placement
from luyen.config.schema.trainer import TrainerConfig
from luyen.train.interrupt import Interrupted
from luyen.train.loop import train_online
from luyen.train.record import open_store, require_finite, saves_in_background
from tests.runs import close, prepare, read_back, same_weights, train, worker_of

EVERY = ("trainer.save_freq=1", "trainer.total_training_steps=3")
ASIDE = (*EVERY, "trainer.async_save=true")


class Gate:
    """Holds the writing thread just before its checkpoint appears."""

    def __init__(self, store: CheckpointStore) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._put = store._put
        store._put = self.wait

    def wait(self, unfinished: Path, place: Path) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        self._put(unfinished, place)


def test_a_copy_keeps_what_was_and_its_memory_is_used_again():
    tied = torch.arange(4.0)
    state = {"a": tied, "b": [tied, (torch.tensor(3), 1.5)], "none": torch.empty(0, 2)}
    staging = Staging()
    copied = staging.copy(state)
    tied.zero_()
    assert copied["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copied["a"] is copied["b"][0]
    assert copied["b"][1] == (torch.tensor(3), 1.5)
    again = staging.copy(state)
    assert again["a"] is copied["a"]
    assert again["a"].tolist() == [0.0] * 4


def test_the_state_is_that_of_the_call_and_the_next_save_waits(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    writer, gate = CheckpointWriter(store, is_async=True), Gate(store)
    weight = torch.ones(3)
    writer.save(1, {"actor": {"w": weight}}, facts={})
    weight.fill_(7.0)
    assert gate.reached.wait(60)
    assert (writer.finished(), store.list()) == ([], ())
    second = threading.Thread(
        target=writer.save, args=(2, {"actor": {"w": weight}}), kwargs={"facts": {}}
    )
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second save waits for the first"
    gate.opened.set()
    second.join(60)
    writer.wait()
    assert (writer.finished(), store.list()) == ([1, 2], (1, 2))
    assert writer.finished() == []
    saved = [load_state(store.load(step).path, "actor")["w"].tolist() for step in (1, 2)]
    assert saved == [[1.0] * 3, [7.0] * 3]


def test_an_error_beside_training_is_raised_once_and_the_same(tmp_path: Path, monkeypatch):
    store = CheckpointStore(tmp_path)
    said: list[str] = []
    for is_async in (False, True):
        writer = CheckpointWriter(store, is_async=is_async)
        save_and_wait(writer, 1)
        with monkeypatch.context() as full:
            full.setattr("luyen.checkpoint.store.sync", refuse)
            with pytest.raises(UserError, match="No space left on device") as caught:
                save_and_wait(writer, 2)
        said.append(str(caught.value))
        writer.wait()
        assert store.list() == (1,)
    assert said[0] == said[1]


def save_and_wait(writer: CheckpointWriter, step: int) -> None:
    writer.save(step, {"loop": {"step": step}}, facts={})
    writer.wait()


def refuse(path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_runs_that_save_beside_training_end_the_same(tmp_path: Path):
    plain = train(tmp_path / "plain", *EVERY)
    aside = train(tmp_path / "aside", *ASIDE)
    assert same_weights(plain, aside)
    assert plain.metrics == aside.metrics
    for step in (1, 2, 3):
        one, other = (
            CheckpointStore(ran.root / "checkpoints").load(step) for ran in (plain, aside)
        )
        assert one.facts["chain"] == other.facts["chain"]
        assert one.facts["metrics"] == other.facts["metrics"]
        assert one.facts["versions"]["torch"]
        for name in ("actor", "actor_optimizer"):
            files = [ran.path / name / "rank_00000.safetensors" for ran in (one, other)]
            assert files[0].read_bytes() == files[1].read_bytes()


def test_work_is_forgotten_in_the_main_thread_once_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = prepare(tmp_path, *ASIDE)
    step_report: list[tuple[int, bool, bool]] = []

    def saved(step: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        step_report.append((step, is_main, step in run.recorder.store.list()))

    monkeypatch.setattr(run.recorder.journals, "forget", saved)
    try:
        train_online(run)
    finally:
        close(run)
    assert step_report == [(1, True, True), (2, True, True), (3, True, True)]


def test_a_save_that_failed_beside_training_stops_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch
):
    run = prepare(
        tmp_path, "trainer.save_freq=1", "trainer.total_training_steps=9", "trainer.async_save=true"
    )
    write = run.recorder.record_step

    def breaking(step: int, metrics: dict[str, float], stages: dict[str, str]) -> None:
        write(step, metrics, stages)
        if step == 2:
            run.recorder.flush()
            monkeypatch.setattr("luyen.checkpoint.store.sync", refuse)

    monkeypatch.setattr(run.recorder, "record_step", breaking)
    try:
        with pytest.raises(UserError, match=r"checkpoint.*step_000002.*No space left"):
            train_online(run)
    finally:
        monkeypatch.undo()
        close(run)
    assert run.step in (2, 3), "the step in progress, and no more"
    assert run.recorder.store.list() == (1,)
    resumed = train(tmp_path, "trainer.total_training_steps=4")
    assert same_weights(resumed, train(tmp_path / "whole", "trainer.total_training_steps=4"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_checkpoint_beside_training(tmp_path: Path, number: int):
    run = prepare(
        tmp_path, *EVERY[:1], "trainer.total_training_steps=50", "trainer.async_save=true"
    )
    gate = Gate(run.recorder.store)

    def interrupt() -> None:
        assert gate.reached.wait(60)
        os.kill(os.getpid(), number)
        threading.Timer(0.3, gate.opened.set).start()

    threading.Thread(target=interrupt).start()
    try:
        with run.interruption:
            try:
                train_online(run)
            except Interrupted:  # a step that has not learned yet is given up, as by the command
                run.save_progress()
            run.recorder.flush()
    finally:
        close(run)
    assert run.interruption.is_wanted
    assert run.step < 50
    assert run.recorder.store.latest() == run.step
    left = read_back(run.recorder.directory.root)
    assert int(left.metrics[-1]["step"]) == run.step
    assert [p.name for p in run.recorder.store.directory.glob(".tmp-*")] == []


def break_weight(run) -> None:
    with torch.no_grad():
        next(iter(worker_of(run).actor.policy.parameters())).view(-1)[3] = float("nan")


@pytest.mark.parametrize("extra", [EVERY, ASIDE], ids=["sync", "aside"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, extra, monkeypatch):
    run = prepare(tmp_path, *extra)
    digest = run.recorder.digests.write

    def breaking(line) -> None:
        digest(line)
        if line.step == 2:
            break_weight(run)

    monkeypatch.setattr(run.recorder.digests, "write", breaking)
    try:
        with pytest.raises(UserError, match=r"actor/.*after step 2.*good checkpoint is step 1"):
            train_online(run)
    finally:
        close(run)
    assert run.recorder.store.list() == (1,)


def test_the_broken_tensor_is_named_and_finite_ones_pass():
    sound = {"actor": {"w": torch.ones(3), "n": torch.empty(0), "i": torch.tensor(1)}}
    require_finite(not_finite({**sound, "loop": {"step": 1}}), step=1, newest=None)
    top = torch.tensor([torch.finfo(torch.bfloat16).max]).bfloat16()
    require_finite(
        not_finite({"actor": {"w": top, "v": torch.tensor([3e38, -3e38])}}), step=1, newest=None
    )
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = {"actor_optimizer": {"masters": [torch.ones(2), torch.tensor([1.0, bad])]}}
        with pytest.raises(UserError, match=r"'actor_optimizer/masters/1'.*step 4.*there is none"):
            require_finite(not_finite({**sound, **broken}), step=4, newest=None)


def placed(device: str, *, runtime: str = "local") -> Placement:
    return Placement(device=device, world_size=1, runtime=runtime, roles=())


def test_null_means_beside_training_on_a_gpu_only():
    assert saves_in_background(TrainerConfig(), placed("cuda"))
    assert not saves_in_background(TrainerConfig(), placed("cpu"))
    assert saves_in_background(TrainerConfig(), placed("cuda", runtime="ray"))
    assert saves_in_background(TrainerConfig(async_save=True), placed("cpu"))
    assert not saves_in_background(TrainerConfig(async_save=False), placed("cuda"))


def test_the_best_of_a_run_stay_and_are_known_after_a_resumption(tmp_path: Path):
    best = ("trainer.keep_best=1", "trainer.best_metric=reward/mean", "trainer.max_ckpt_to_keep=1")
    whole = train(tmp_path / "all", "trainer.save_freq=1", "trainer.total_training_steps=5")
    rewards = whole.course("reward/mean")
    train(tmp_path / "best", *best, "trainer.save_freq=1", "trainer.total_training_steps=3")
    ran = train(tmp_path / "best", *best, "trainer.save_freq=1", "trainer.total_training_steps=5")
    top = max(range(5), key=lambda i: (rewards[i], i)) + 1
    store = CheckpointStore(ran.root / "checkpoints")
    assert set(store.list()) == {top, 5}
    assert store.load(top).facts["metrics"]["reward/mean"] == max(rewards)


def test_the_last_value_of_a_rare_metric_is_noted(tmp_path: Path):
    rows = ("data.val_files=arithmetic://sum?digits=1&split=held-out", "trainer.test_freq=2")
    ran = train(tmp_path, *rows, *EVERY)
    store = CheckpointStore(ran.root / "checkpoints")
    noted = [store.load(step).facts["metrics"]["val/accuracy"] for step in (1, 2, 3)]
    assert noted == ran.course("val/accuracy"), "measured before training, after step 2, at the end"


def test_the_store_follows_the_configuration(tmp_path: Path):
    store = open_store(tmp_path, TrainerConfig(max_ckpt_to_keep=2, keep_best=3, best_mode="min"))
    assert store.best is not None
    assert (store.keep, store.best.count, store.best.mode) == (2, 3, "min")
