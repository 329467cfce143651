"""`luyen.train` with Python objects: a run that is whole, resumes, and refuses what cannot work."""

import importlib
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import luyen
from luyen.base.digests import read_digests
from luyen.data.tokenizer import resolve_path
from luyen.rewards.calls import function_of
from luyen.rollout.tools.tool_file import file_tools
from luyen.sandbox.worker import module_of
from tests.e2e.tiny import luyen as command

SCRIPT = """
import re
NUMBER = re.compile(r"-?[0-9]+")
seen = []

def right(completions, answer, **columns):
    seen.append(len(completions))
    return [float(NUMBER.findall(c)[-1:] == [a]) for c, a in zip(completions, answer)]

def brief(data_source, solution_str, ground_truth, extra_info):
    return 1.0 / (1 + len(solution_str))

import threading
total = threading.Lock()
def reads(completions, **columns):
    total.locked()
    return [float(len(c)) for c in completions]

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return a + b
"""
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
SMALL: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.max_response_length": 8,
    "actor_rollout_ref.rollout.n": 4,
    "trainer": {"device": "cpu", "logger": [], "val_before_train": False},
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a script, in whose folder the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return runpy.run_path("script.py", run_name="__main__")


def train(*sources: Any, steps: int, name: str, **objects: Any) -> luyen.Run:
    trainer = {"total_training_steps": steps, "experiment_name": name}
    objects = {"model": "builtin://arithmetic", "data": ROWS, **objects}
    return luyen.train(SMALL, *sources, trainer=trainer, **objects)


def forget_objects() -> None:
    """Let this process be another one, which never had the objects."""
    for name in [n for n in sys.modules if n.startswith("luyen_file_")]:
        del sys.modules[name]
    function_of.cache_clear()
    module_of.cache_clear()


def chain(run: luyen.Run) -> list[str]:
    return [one.chain for one in read_digests(run.directory.digests)]


def test_a_run_of_objects_is_whole_and_resumes_without_them(script: dict[str, Any]):
    rewards = [script["right"], (script["brief"], 0.5)]
    often = {"trainer.test_freq": 1, "trainer.save_freq": 2}
    whole = train(often, steps=4, name="whole", reward=rewards, val_data=ROWS[:4])
    assert script["seen"], "the function itself is called"
    row = whole.metrics()[-1]
    assert row["reward/mean"] == pytest.approx(
        row["reward/right/mean"] + 0.5 * row["reward/brief/mean"]
    )
    held = sorted(path.name.partition("-")[0] for path in whole.directory.inputs.iterdir())
    assert held == ["reward", "train", "validation"]
    script["seen"].clear()
    part = train(often, steps=2, name="part", reward=rewards, val_data=ROWS[:4])
    forget_objects()
    resumed = command("train", "--resume", part.root, "trainer.total_training_steps=4")
    assert resumed.exit_code == 0, resumed.output
    assert chain(part) == chain(whole)


def test_code_of_another_users_run_is_not_called_without_trust(
    script: dict[str, Any], tmp_path: Path
):
    run = train(steps=1, name="theirs", reward=script["brief"])
    (run.root / "signature.json").unlink()
    forget_objects()
    longer = {"trainer.total_training_steps": 2}
    for refused in (
        lambda: luyen.train(longer, resume=run),
        lambda: luyen.train(run.directory.config, longer),
        lambda: luyen.evaluate(run, {"data.val_files": ["arithmetic://sum"]}),
    ):
        with pytest.raises(luyen.UserError, match="not known to be yours"):
            refused()
    assert not [n for n in sys.modules if n.startswith("luyen_file_")], "nothing was imported"
    assert len(luyen.train(longer, resume=run, trust=True).metrics()) == 2


def test_another_reward_is_another_run(script: dict[str, Any]):
    train(steps=1, name="one", reward=script["right"])
    before = sorted(Path("runs/luyen/one/inputs").iterdir())
    with pytest.raises(luyen.UserError, match="would be another one"):
        train(steps=2, name="one", reward=script["brief"])
    assert sorted(Path("runs/luyen/one/inputs").iterdir()) == before
    run = train(steps=2, name="one", reward=script["right"])
    assert [row["step"] for row in run.metrics()] == [1, 2]


def test_a_reward_without_source_is_wanted_again(script: dict[str, Any]):
    run = train(steps=1, name="held", reward=script["reads"])
    assert run.facts.state == "finished"
    forget_objects()
    refused = command("train", "--resume", run.root, "trainer.total_training_steps=2")
    assert refused.exit_code != 0
    assert "A11" in refused.output
    assert "luyen.train(resume=RUN, reward=reads)" in " ".join(refused.output.split())
    longer = {"trainer.total_training_steps": 2}
    luyen.train(longer, resume=run, reward=script["reads"])
    assert run.metrics()[-1]["step"] == 2


def test_a_reward_without_source_stays_in_its_process(script: dict[str, Any]):
    report = luyen.check(
        SMALL,
        {"reward.reward_manager.name": "prime"},
        model="builtin://arithmetic",
        data=ROWS,
        reward=script["reads"],
    )
    assert "A12" in [problem.id for problem in report.problems]
    sound = luyen.check(SMALL, model="builtin://arithmetic", data=ROWS, reward=script["reads"])
    assert sound.is_sound, sound.problems


def test_a_refused_run_leaves_nothing_behind(script: dict[str, Any], tmp_path: Path):
    with pytest.raises(luyen.UserError, match="total_training_steps"):
        train(steps=0, name="none", reward=script["right"])
    assert not (tmp_path / "runs" / "luyen" / "none").exists()
    with pytest.raises(luyen.UserError, match="row 1"):
        train(steps=1, name="none", reward=script["right"], data=[{"answer": "2"}])
    assert not (tmp_path / "runs" / "luyen" / "none" / "inputs").exists()


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ([], "it has no function"),
        (3, "it is no function"),
        ([("exact", 1.0), len], "rules by name do not mix"),
        ([(len, "much")], "no pair"),
    ],
)
def test_what_is_no_reward_is_refused(reward: Any, why: str, script: dict[str, Any]):
    with pytest.raises(luyen.UserError, match=why):
        train(steps=1, name="none", reward=reward)


def test_rules_by_name_have_weights():
    config = luyen.check(SMALL, data=ROWS, reward=[("exact", 2.0), "length"]).config
    assert config.reward.components["exact"] == {"rule": "exact", "weight": 2.0}


def test_runs_without_a_name_are_two_runs():
    pages = [{"trainer.total_training_steps": 0, "data.train_files": ["arithmetic://sum"]}]
    with pytest.raises(luyen.UserError):
        luyen.train(*pages)
    assert not Path("runs/luyen/run").exists()


def test_functions_are_tools(script: dict[str, Any]):
    run = train(
        {"actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 2},
        steps=1,
        name="tools",
        reward=script["right"],
        tools=[script["add"]],
    )
    assert run.facts.state == "finished"
    forget_objects()
    path = run.config()["actor_rollout_ref"]["rollout"]["multi_turn"]["function_tool_path"]
    [made] = file_tools(path)
    assert made.schema["function"]["description"] == "Add two numbers."


def test_a_loaded_model_is_saved_with_the_run_and_stays_as_it_is(script: dict[str, Any]):
    library: Any = importlib.import_module("transformers")
    source = resolve_path("builtin://arithmetic")
    model = library.AutoModelForCausalLM.from_pretrained(source)
    tokenizer = library.AutoTokenizer.from_pretrained(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = train(steps=1, name="model", model=model, tokenizer=tokenizer, reward=script["right"])
    by_name = train(steps=1, name="by_name", reward=script["right"])
    assert chain(run)[-1] == chain(by_name)[-1]
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    [folder] = run.directory.inputs.glob("model-*")
    assert (folder / "model.safetensors").is_file()
    again = train(steps=2, name="model", model=model, tokenizer=tokenizer, reward=script["right"])
    assert again.metrics()[-1]["step"] == 2
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(luyen.UserError, match="would be another one"):
        train(steps=3, name="model", model=model, tokenizer=tokenizer, reward=script["right"])
    assert [*run.directory.inputs.glob("model-*")] == [folder]


def test_what_is_no_model_is_refused(script: dict[str, Any]):
    with pytest.raises(luyen.UserError, match="it is no model of transformers"):
        train(steps=1, name="none", model=torch.nn.Linear(1, 1), reward=script["right"])


def test_a_run_that_was_moved_has_its_inputs(script: dict[str, Any], tmp_path: Path):
    run = train(steps=1, name="moved", reward=script["right"], val_data=ROWS[:2])
    forget_objects()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    root = tmp_path / "elsewhere" / "luyen" / "moved"
    assert not run.root.exists()
    resumed = command("train", "--resume", root, "trainer.total_training_steps=2")
    assert resumed.exit_code == 0, resumed.output
    assert luyen.load_run(root).metrics()[-1]["step"] == 2


@pytest.mark.parametrize(
    ("number", "ending", "code"),
    [
        (signal.SIGTERM, SystemExit, 143),
        (signal.SIGHUP, SystemExit, 129),
        (signal.SIGINT, KeyboardInterrupt, None),
    ],
)
def test_a_signal_ends_the_program_after_the_run_has_saved(
    script: dict[str, Any], number: int, ending: type[BaseException], code: int | None
):
    class Sends(luyen.Callback):
        def on_step(self, progress: Any, metrics: Any) -> None:
            if progress.step == 1:
                os.kill(os.getpid(), number)

    ended: list[BaseException] = []
    try:
        train(steps=3, name="signalled", reward=script["right"], callbacks=[Sends()])
    except BaseException as error:  # noqa: BLE001 - what would end the program
        ended.append(error)
    assert [type(one) for one in ended] == [ending]
    assert code is None or ended[0].args == (code,)
    run = train(steps=3, name="signalled", reward=script["right"])
    assert run.facts.state == "finished"
    assert chain(run) == chain(train(steps=3, name="whole", reward=script["right"]))


def test_a_signal_meets_the_handler_of_the_program(script: dict[str, Any]):
    class Sends(luyen.Callback):
        def on_step(self, progress: Any, metrics: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    met: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: met.append(number))
    try:
        run = train(steps=3, name="handled", reward=script["right"], callbacks=[Sends()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert met == [signal.SIGTERM]
    assert run.facts.state == "interrupted"
