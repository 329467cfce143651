"""A run that stops early: at the same step whether or not it was interrupted, and says why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import luyen
from luyen.base.digests import read_digests
from tests.e2e.tiny import luyen as command

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
SMALL: dict[str, Any] = {
    "actor_rollout_ref.model.path": "builtin://arithmetic",
    "data.train_batch_size": 4,
    "data.max_response_length": 8,
    "actor_rollout_ref.rollout.n": 2,
    "reward.components.answer.rule": "exact",
    "trainer.device": "cpu",
    "trainer.logger": [],
    "trainer.val_before_train": False,
}
ONLINE = ("reward.components.answer.rule", "actor_rollout_ref.rollout.n")
STOPPING = luyen.EarlyStopping(metric="actor/lr", patience=3, mode="max")
"""The learning rate never rises here, so a run stops after step 4."""


class Told(luyen.Callback):
    """Keeps what it was told, and may ask for the end."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[Any] = []
        self._stop_at = stop_at

    def on_start(self, progress: luyen.TrainingProgress) -> None:
        self.events.append(("start", progress.step, progress.total_steps))

    def on_step(
        self, progress: luyen.TrainingProgress, metrics: Mapping[str, float]
    ) -> luyen.Stop | None:
        self.events.append(("step", progress.step, metrics["reward/mean"]))
        return luyen.Stop(reason="that is enough") if progress.step == self._stop_at else None

    def on_validation(self, progress: luyen.TrainingProgress, metrics: Mapping[str, float]) -> None:
        self.events.append(("validation", progress.step, sorted(metrics)[0].partition("/")[0]))

    def on_checkpoint(self, progress: luyen.TrainingProgress, path: Path) -> None:
        self.events.append(("checkpoint", progress.step, path.name))

    def on_end(self, progress: luyen.TrainingProgress, reason: str | None) -> None:
        self.events.append(("end", progress.step, reason))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(name: str, *, steps: int = 7, **more: Any) -> luyen.Run:
    trainer = {"experiment_name": name, "total_training_steps": steps, "save_freq": 1}
    return luyen.train(SMALL, trainer=trainer, data=ROWS, **more)


def chain(run: luyen.Run) -> list[str]:
    return [one.chain for one in read_digests(run.directory.digests)]


def test_a_run_that_was_interrupted_stops_at_the_same_step():
    whole = train("whole", callbacks=[STOPPING])
    assert whole.facts.state == "finished"
    assert whole.facts.note.startswith("stopped early after step 4: actor/lr has not risen")
    part = train("part", callbacks=[STOPPING, Told(stop_at=2)])
    assert part.facts.note == "stopped early after step 2: that is enough"
    resumed = command("train", "--resume", part.root)
    assert resumed.exit_code == 0, resumed.output
    assert "Stopped early, actor/lr has not risen" in " ".join(resumed.output.split())
    assert chain(part) == chain(whole)
    assert len(chain(part)) == 4
    again = command("train", "--resume", part.root)
    assert again.exit_code == 0, again.output
    assert chain(part) == chain(whole)
    longer = command("train", "--resume", part.root, "trainer.early_stopping.patience=4")
    assert longer.exit_code == 0, longer.output
    assert len(chain(part)) == 5


def test_callbacks_are_told_in_order():
    told = Told(stop_at=2)
    train("told", callbacks=[told], val_data=ROWS[:2])
    means = [event[2] for event in told.events if event[0] == "step"]
    assert told.events == [
        ("start", 0, 7),
        ("step", 1, means[0]),
        ("checkpoint", 1, "step_000001"),
        ("step", 2, means[1]),
        ("checkpoint", 2, "step_000002"),
        ("end", 2, "that is enough"),
    ]
    last = Told()
    train("told", steps=3, callbacks=[last], val_data=ROWS[:2])
    assert [event[:2] for event in last.events] == [
        ("start", 2),
        ("step", 3),
        ("validation", 3),
        ("checkpoint", 3),
        ("end", 3),
    ]


def test_an_offline_stage_stops_early():
    roles = {"user": "question", "assistant": "answer"}
    rows = [
        {"messages": [{"role": role, "content": row[column]} for role, column in roles.items()]}
        for row in ROWS
    ]
    run = luyen.train(
        {name: value for name, value in SMALL.items() if name not in ONLINE},
        trainer={"stage": "sft", "experiment_name": "sft", "total_training_steps": 6},
        data=rows,
        callbacks=[
            luyen.EarlyStopping(metric="sft/nll", patience=2, minimum_change=100.0, mode="min")
        ],
    )
    assert run.metrics()[-1]["step"] == 3
    assert "sft/nll has not fallen below" in run.facts.note


def test_what_cannot_stop_a_run_is_refused():
    val = luyen.EarlyStopping(metric="val/accuracy")
    with pytest.raises(luyen.UserError, match="nothing measures it"):
        train("none", callbacks=[val])
    with pytest.raises(luyen.UserError, match="measured at the end only"):
        train("none", callbacks=[val], val_data=ROWS[:2])
    with pytest.raises(luyen.UserError, match="it is no callback"):
        train("none", callbacks=[print])
    with pytest.raises(luyen.UserError, match="one metric"):
        train("none", callbacks=[val, val])
    report = luyen.check(SMALL, data=ROWS, trainer={"early_stopping": {"patience": 5}})
    assert "A14" in [problem.id for problem in report.problems]
