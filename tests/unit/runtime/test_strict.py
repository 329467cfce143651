"""Strict mode: nothing is shared with the roles, and what cannot travel is found out at once."""

from pathlib import Path
from typing import Any

import pytest

from luyen.runtime.in_process import STRICT_VARIABLE, LocalWorkers, pickle_roundtrip
from luyen.train.loop import train_online
from tests.runs import close, prepare, read_back, same_weights


def trained(folder: Path, *words: str):
    run = prepare(folder, *words)
    try:
        train_online(run)
    finally:
        close(run)
    return run, read_back(run.recorder.directory.root)


PPO = ("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=2", "critic.optim.lr=1.0e-3")


def test_a_run_is_the_same_behind_the_walls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = (*PPO, "actor_rollout_ref.actor.use_kl_loss=true")
    plain, free = trained(tmp_path / "free", *words)
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    walled, strict = trained(tmp_path / "strict", *words)
    assert [run.roles.workers.is_strict for run in (plain, walled)] == [False, True]
    assert same_weights(free, strict)
    assert free.metrics == strict.metrics


def test_what_cannot_travel_is_refused_and_identity_is_lost():
    class Echo:
        """A worker that returns what it was given."""

        def values(self, batch: object) -> object:
            seen.append(batch)
            return batch

    seen: list[object] = []
    worker: Any = Echo()
    given = {"tokens": [1, 2]}
    values: Any = Echo.values
    assert LocalWorkers(worker).each(values, [given])[0] is given is seen[0]
    strict = LocalWorkers(worker, is_strict=True)
    (found,) = strict.each(values, [given])
    assert found == given == seen[1]
    assert len({id(given), id(seen[1]), id(found)}) == 3
    with pytest.raises((AttributeError, TypeError)):
        strict.each(values, [lambda: None])
    with pytest.raises(TypeError):
        pickle_roundtrip(number for number in [1])
