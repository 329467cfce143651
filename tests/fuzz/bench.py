"""Runs to be damaged: one that was killed twice, the same at its end, and two to compare with."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from luyen.base.digests import page_with_checksum, read_digests
from luyen.base.files import write_whole
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.telemetry.metrics import read_metrics
from tests.fuzz.server import Commands, Said
from tests.kill.cases import KILLED, SHAPES
from tests.runs import ACTOR, ROLLOUT, TINY

KILLED_RUN, FINISHED = "killed", "finished"
_WHOLE, _OTHER = "whole", "other"
_EVERY = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "data.val_files=arithmetic://sum?digits=1&split=held-out",
    "data.val_max_samples=3",
    "trainer.logger=[jsonl, tensorboard]",
    f"{ACTOR}.ppo_mini_batch_size=2",
)
_KILLS = (("some rollouts are generated", 13), ("advantages are there", 3))
"""A kill in the first step, and one in the third, after a checkpoint and with a journal."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What matters of a run that came to its end."""

    chains: dict[int, str]
    metrics: dict[int, dict[str, float]]
    weights: str
    """SHA-256 of the file of the policy's weights."""


@final
@dataclass(frozen=True, slots=True)
class Bench:
    """The runs of one shape. Each is put in the same place, so that what is said is the same."""

    commands: Commands
    folder: Path
    shape: str
    intact: dict[tuple[str, str], Said] = field(default_factory=dict[tuple[str, str], Said])
    """What readers said of undamaged runs, by reader and run."""

    @property
    def place(self) -> Path:
        """Where the run that is read lies."""
        return self.folder / "work" / "luyen" / "run"

    @property
    def other(self) -> Path:
        """A run at another temperature."""
        return self.folder / _OTHER

    @property
    def whole(self) -> Path:
        """A run that was never interrupted."""
        return self.folder / _WHOLE

    def build(self) -> None:
        """Make the runs, and prove that the killed one ends as the other does."""
        self.folder.mkdir(parents=True)
        (self.folder / "empty.yaml").write_text("trainer: {experiment_name: run}\n")
        for name, words in ((_WHOLE, ()), (_OTHER, (f"{ROLLOUT}.temperature=0.9",))):
            self._demand(self.train(*words))
            self._keep(name)
        for point, call in _KILLS:
            ended = self.train(point=point, call=call)
            assert ended.status == KILLED, f"{point}: {ended}"
        self._plant_parity()
        shutil.copytree(self.place, self.folder / KILLED_RUN)
        self._demand(self.train())
        assert outcome_of(self.place) == outcome_of(self.whole)
        self._keep(FINISHED)

    def put(self, name: str) -> Path:
        """Put an undamaged run in the place."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.folder / name, self.place)
        return self.place

    def train(self, *words: str, point: str | None = None, call: int = 1) -> Said:
        """Begin the run in the place, or go on with it; with a point, until it is killed there."""
        file = str(self.folder / "empty.yaml")
        return self.commands.run("train", file, *self._words(), *words, point=point, call=call)

    def _words(self) -> tuple[str, ...]:
        where = f"trainer.default_local_dir={self.folder / 'work'}"
        return (*TINY, *SHAPES[self.shape], *_EVERY, where)

    def _keep(self, name: str) -> None:
        self.place.rename(self.folder / name)

    def _plant_parity(self) -> None:
        """Sampler and trainer agree in these runs; let them have disagreed once."""
        path = RunDirectory(self.place).parity(2)
        path.parent.mkdir()
        token = {"rollout": "2.0.ab/0", "position": 3, "text": "7", "version": 1, "gap": 0.25}
        token |= {"sampler": -0.5, "trainer": -0.25, "kept_mass": None, "part": "engine"}
        write_whole(path, page_with_checksum({"schema": 1, "step": 2, "tokens": [token]}))

    def _demand(self, said: Said) -> None:
        assert said.status == 0, said.text[-4000:]


def outcome_of(root: Path) -> Outcome:
    """What a run came to, times aside."""
    newest = CheckpointStore(root / "checkpoints").newest_sound()
    assert newest is not None
    folder = newest.path / "actor"
    return Outcome(
        chains={line.step: line.chain for line in read_digests(root / "digests.jsonl")},
        metrics={line.step: line.timeless() for line in read_metrics(root / "metrics.jsonl")},
        weights=(folder / "rank_00000.safetensors").read_bytes().hex(),
    )
