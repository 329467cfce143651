"""Strict mode: nothing is shared with the roles, and what cannot travel is found out at once."""

from pathlib import Path

import pytest

from luyen.runtime.in_process import STRICT_VARIABLE, LocalRoles, StrictRoles, pickle_roundtrip
from luyen.train.loop import train_online
from tests.runs import OnlineRun, close, prepare, read_back, same_weights


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
    assert isinstance(plain.roles, LocalRoles)
    assert isinstance(walled.roles, StrictRoles)
    assert same_weights(free, strict)
    assert free.metrics == strict.metrics


def test_what_cannot_travel_is_refused_and_identity_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    run: OnlineRun = prepare(tmp_path)
    seen: list[object] = []

    class Inner:
        """Roles that return what they were given."""

        generation = run.roles.generation

        def values(self, batch: object) -> object:
            seen.append(batch)
            return batch

    try:
        strict = StrictRoles(Inner())  # type: ignore[arg-type]
        given = {"tokens": [1, 2]}
        assert strict.values(given) == given  # type: ignore[arg-type]
        assert seen[0] is not given
        with pytest.raises((AttributeError, TypeError)):
            strict.values(lambda: None)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            pickle_roundtrip(number for number in [1])
    finally:
        close(run)
