"""Digests of runs: equal for equal runs, and parted at the stage that an input acts on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from luyen.base.digests import BEGINNING, STAGES, read_digests
from luyen.cli.main import app
from luyen.studio.diff import RunDifference, compare_runs
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from tests.runs import ACTOR, CHATTY, MODEL, ROLLOUT, Ran, close, prepare, train, worker_of

STEPS = "trainer.total_training_steps=3"
VALIDATED = ("data.val_files=arithmetic://sum?digits=1&split=held-out", "trainer.test_freq=2")
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3", f"{ROLLOUT}.n=2")
LORA = (f"{MODEL}.lora_rank=4",)
OFF_POLICY = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true")
TWICE = """

def twice(*args, **kwargs):
    found = compute_score(*args, **kwargs)
    return {**found, "score": 2 * found["score"]}
"""
HALF = (f"{MODEL}.dtype=bfloat16",)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("plain"), STEPS)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("chatty"), *CHATTY)


def chains(run: Ran) -> list[str]:
    return [line.chain for line in read_digests(run.root / "digests.jsonl")]


def parting(difference: RunDifference) -> tuple[int, str]:
    assert difference.parting is not None
    return difference.parting.step, difference.parting.stage


def diff(a: Ran, b: Ran, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diff", str(a.root), str(b.root), *options])
    return done.exit_code, done.output


def stopped_after(steps: int, run: OnlineRun) -> None:
    """Carry out a run that is asked to end in the middle of one of its steps."""
    update = run.roles.update_actor

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        run.interruption.is_wanted = run.step + 1 == steps
        return update(*args, **kwargs)

    run.roles.update_actor = interrupted  # type: ignore[method-assign]
    train_online(run)
    close(run)


def test_equal_runs_have_equal_chains(plain: Ran, tmp_path: Path):
    again = train(tmp_path, STEPS)
    assert chains(again) == chains(plain)
    assert len(set(chains(plain))) == 3
    code, said = diff(plain, again)
    assert (code, "Equal in all 3 steps" in said) == (0, True), said
    assert "No recorded input differs" in said


def test_every_step_has_every_stage_and_a_validation_before_has_one(tmp_path: Path):
    lines = read_digests(train(tmp_path, STEPS, *VALIDATED).root / "digests.jsonl")
    assert [line.step for line in lines] == [0, 1, 2, 3]
    assert lines[0].previous == BEGINNING
    assert set(lines[0].stages) == {"metrics"}
    assert all(set(line.stages) == set(STAGES) for line in lines[1:])


def test_how_generation_is_batched_changes_no_digest(plain: Ran, tmp_path: Path):
    other = train(tmp_path, STEPS, f"{ROLLOUT}.max_num_seqs=5")
    assert chains(other) == chains(plain)
    code, said = diff(plain, other)
    assert (code, "max_num_seqs: 256 -> 5" in said) == (0, True), said


@pytest.mark.parametrize(
    ("override", "stage", "key"),
    [
        (f"{ACTOR}.optim.lr=2.0e-3", "weights", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.optim.betas=[0.8, 0.999]", "gradients", f"{ACTOR}.optim.betas"),
        (f"{ACTOR}.entropy_coeff=0.1", "gradients", f"{ACTOR}.entropy_coeff"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "advantages", None),
        ("reward.custom_reward_function.name=twice", "rewards", None),
        (f"{ROLLOUT}.temperature=0.7", "rollouts", f"{ROLLOUT}.temperature"),
        ("trainer.seed=1", "prompts", "trainer.seed"),
    ],
)
def test_runs_part_in_the_first_step_at_the_stage_that_changed(
    override: str, stage: str, key: str | None, plain: Ran, tmp_path: Path
):
    reward = tmp_path / "shares_and_twice.py"
    source = (Path(__file__).parent.parent / "shares_reward.py").read_text()
    reward.write_text(source + TWICE)
    words = [override]
    if stage == "rewards":
        words.append(f"reward.custom_reward_function.path={reward}")
    other = train(tmp_path, STEPS, *words)
    found = compare_runs(plain.root, other.root)
    assert parting(found) == (1, stage)
    assert found.suspects[0].name == (key or words[-1].partition("=")[0])
    assert found.suspects[0].acts_on == stage
    code, said = diff(plain, other)
    assert code == 1
    assert f"They part at step 1, in its {stage}." in said
    assert f"most likely {found.suspects[0].name}" in said


def test_the_first_token_and_the_first_part_of_a_reward_are_named(plain: Ran, tmp_path: Path):
    other = train(tmp_path, STEPS, f"{ROLLOUT}.temperature=0.7")
    code, said = diff(plain, other, "--json")
    page = json.loads(said)
    assert (code, page["equal"], page["stage"]) == (1, False, "rollouts")
    found = page["found"]
    assert found["what"] == "token"
    assert found["a"]["source"] == found["b"]["source"] == "sampled"
    assert found["a"]["logp"] != found["b"]["logp"]
    assert "reward/mean" in page["metrics"]


@pytest.mark.parametrize(
    "overrides",
    [VALIDATED, PPO, LORA, OFF_POLICY, HALF, CHATTY],
    ids=["plain", "critic", "lora", "off-policy", "bf16", "tools"],
)
def test_the_chain_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    overrides: tuple[str, ...], tmp_path: Path
):
    whole = train(tmp_path / "whole", STEPS, *overrides)
    stopped_after(1, prepare(tmp_path / "parts", STEPS, *overrides))
    parts = train(tmp_path / "parts", STEPS, *overrides)
    assert chains(parts) == chains(whole)
    assert compare_runs(whole.root, parts.root).is_equal


def test_steps_that_are_done_again_after_a_crash_continue_the_chain(tmp_path: Path, plain: Ran):
    folder = tmp_path / "crashed"
    stopped_after(1, prepare(folder, STEPS))
    run = prepare(folder, STEPS)
    run.save = _crash_at(run, 3)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="power"):
        train_online(run)
    close(run)
    assert len(read_digests(run.recorder.directory.digests)) == 3
    assert chains(train(folder, STEPS)) == chains(plain)


def _crash_at(run: OnlineRun, step: int) -> Callable[[], None]:
    def save() -> None:
        if run.step == step:
            raise RuntimeError("the power is gone")

    return save


def test_conversations_have_chains_that_the_clock_does_not_change(chatty: Ran, tmp_path: Path):
    again = train(tmp_path, *CHATTY, f"{ROLLOUT}.max_num_seqs=4")
    assert chains(again) == chains(chatty)


def test_a_tool_that_answers_otherwise_shows_as_a_call_or_a_token(chatty: Ran, tmp_path: Path):
    tools = (Path(__file__).parent.parent / "chatty_tools.py").read_text()
    other = tmp_path / "other_tools.py"
    other.write_text(tools.replace("text[:6][::-1]", "text[:6]"))
    assert other.read_text() != tools
    turns = f"{ROLLOUT}.multi_turn.function_tool_path"
    changed = train(tmp_path, *CHATTY, f"{turns}={other}")
    found = compare_runs(chatty.root, changed.root)
    assert parting(found) == (1, "rollouts")
    assert found.found is not None
    assert found.found.what in ("token", "call")
    assert found.suspects[0].name == turns


def test_a_weight_that_changes_by_one_bit_parts_the_runs(plain: Ran, tmp_path: Path):
    run = prepare(tmp_path, STEPS)
    update = run.roles.update_actor

    def and_a_bit(*args: Any, **kwargs: Any) -> Any:
        done = update(*args, **kwargs)
        if run.step + 1 == 2:
            weight = next(iter(worker_of(run).actor.policy.parameters()))
            weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return done

    run.roles.update_actor = and_a_bit  # type: ignore[method-assign]
    train_online(run)
    close(run)
    found = compare_runs(plain.root, run.recorder.directory.root)
    assert parting(found) == (2, "weights")
    assert found.parting is not None
    assert found.parting.stages == ("weights",)
    assert (found.suspects, found.inputs) == ((), ())
    done = CliRunner().invoke(app, ["diff", found.a, found.b])
    assert done.exit_code == 1
    assert "nothing that is recorded" in done.output


def test_a_longer_run_is_not_equal_but_does_not_part(plain: Ran, tmp_path: Path):
    longer = train(tmp_path, "trainer.total_training_steps=4")
    found = compare_runs(plain.root, longer.root)
    assert (found.parting, found.only_b, found.is_equal) == (None, (4,), False)
    code, said = diff(plain, longer)
    assert (code, "Only B has step 4." in said) == (1, True), said
