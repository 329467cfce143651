"""`luyen replay` as a command: what it prints, and its exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from luyen.base.rundir import RunDirectory
from luyen.cli.main import app
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.token_file import read_token_numbers
from luyen.telemetry.rollout_files import read_rollouts
from tests.forked_python import forked_python
from tests.runs import ACTOR, CHATTY, Ran, train

OFF_POLICY = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=0.01")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("ran"), *OFF_POLICY)


def replay(root: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["replay", str(root), *words])
    return done.exit_code, done.output


def replayed_page(root: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["replay", str(root), *words, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_another_process_gets_the_same_bits(tmp_path: Path):
    chatty = train(tmp_path, *CHATTY)
    words = [sys.executable, "-m", "luyen", "replay", str(chatty.root), "--step", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "from the beginning and 1 recorded step\n" in done.stdout
    assert "As in the run, to the last bit" in done.stdout
    assert "actor/grad_norm" in done.stdout
    rollout = max(ReplayRecord(chatty.root).step(2).rollouts, key=lambda r: r.num_turns)
    words = [forked_python(), *words[1:], "--rollout", f"{rollout.group}/{rollout.sample}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"in {rollout.num_turns} turns, drawn again" in done.stdout
    assert "Every token came again" in done.stdout


def test_a_step_that_comes_out_otherwise_is_said_at_once_and_gives_1(ran: Ran, tmp_path: Path):
    root = Path(shutil.copytree(ran.root, tmp_path / "copy"))
    digests = root / "digests.jsonl"
    other = train(tmp_path / "other", *OFF_POLICY, f"{ACTOR}.clip_ratio=0.1")
    shutil.copy(other.root / "digests.jsonl", digests)
    done = CliRunner().invoke(app, ["replay", str(root), "--step", "2"])
    assert done.exit_code == 1
    assert "step 1 parts from the run in its gradients" in done.stderr
    assert "It parts from the run at step 1, in its gradients." in done.stdout
    assert "different: gradients, weights" in done.stdout
    code, page = replayed_page(root, "--step", "2")
    assert (code, page["equal"]) == (1, False)
    assert page["parting"] == {"step": 1, "stage": "gradients"}


def test_numbers_of_every_token_are_those_that_the_step_measured(tmp_path: Path):
    run = train(tmp_path)
    file = tmp_path / "tokens.parquet"
    words = ("--step", "2", "--tokens", str(file))
    code, said = replay(run.root, *words)
    assert code == 0, said
    rows = read_rollouts(RunDirectory(run.root).rollouts(2))
    entropies: list[float] = []
    for row in rows:
        one = row.rollout
        facts = {"group": str(one.group), "sample": one.sample, "tokens": one.tokens}
        found = read_token_numbers(file, **facts)
        assert found is not None
        assert found[1]
        assert row.trainer_logps is not None
        for again, recorded in zip(found[0].trainer_logps, row.trainer_logps, strict=True):
            assert again == (None if recorded is None else pytest.approx(recorded, abs=1e-5))
        entropies += [value for value in found[0].entropy if value is not None]
    recorded = ReplayRecord(run.root).metrics[2]["actor/entropy"]
    assert sum(entropies) / len(entropies) == pytest.approx(recorded, abs=1e-5)
    code, said = replay(run.root, *words, "--set", f"{ACTOR}.clip_ratio=0.02")
    assert code == 2
    assert "--tokens" in said


def test_a_changed_key_shows_numbers_and_tokens(ran: Ran):
    words = ("--step", "2", "--set", f"{ACTOR}.clip_ratio=0.02")
    code, said = replay(ran.root, *words)
    assert code == 0, said
    assert f"{ACTOR}.clip_ratio: 0.2 -> 0.02" in said
    assert "The change acts on its gradients, weights." in said
    assert "actor/pg_clipfrac" in said
    assert "newly clipped, " in said
    code, page = replayed_page(ran.root, *words)
    assert (code, page["stages"]) == (0, ["gradients", "weights"])
    assert {"loss", "weight", "ratio", "advantage", "gradient", "is_clipped"} == set(
        page["tokens"][0]["before"]
    )
    tokens = sum(
        logp is not None for r in ReplayRecord(ran.root).step(2).rollouts for logp in r.logps
    )
    assert len(page["tokens"]) == 2 * tokens


def test_several_keys_at_once_and_one_that_cannot_act(ran: Ran):
    words = ("--step", "1", "--set", "algorithm.adv_estimator=rloo")
    code, said = replay(ran.root, *words, "--set", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    assert code == 0, said
    assert "The change acts on its advantages, gradients, weights." in said
    code, said = replay(ran.root, *words, "--set", "data.train_batch_size=8")
    assert code == 2
    assert "are drawn already" in said


def test_what_cannot_be_done_gives_2_and_the_reason(ran: Ran, tmp_path: Path):
    assert replay(tmp_path, "--step", "1")[0] == 2
    code, said = replay(ran.root, "--step", "7")
    assert (code, "it did 1 to 2" in said) == (2, True)
    code, said = replay(ran.root, "--step", "1", "--rollout", "1", "--set", "algorithm.gamma=0.5")
    assert (code, "leave out --set, or --rollout" in said) == (2, True)
    code, said = replay(ran.root, "--step", "1", "--rollout", "1.")
    assert (code, "several begin so" in said) == (2, True)


def test_a_rollout_as_data(ran: Ran):
    rollout = ReplayRecord(ran.root).step(2).rollouts[0]
    name = f"{rollout.group}/{rollout.sample}"
    code, page = replayed_page(ran.root, "--step", "2", "--rollout", name)
    assert (code, page["equal"], page["rollout"]) == (0, True, name)
    assert page["tokens"][0]["recorded"] == page["tokens"][0]["regenerated"]
