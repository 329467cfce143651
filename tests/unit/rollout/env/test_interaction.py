"""Users written for verl: their file, their interface, and what goes wrong with either."""

import asyncio
from pathlib import Path

import pytest
import yaml

from luyen.base.errors import UserError
from luyen.base.records import StopReason, make_prompt
from luyen.config.environments import read_interactions
from luyen.rollout.build import EnvSelector, envs
from luyen.rollout.env import interactions
from tests.talk import ScriptedEngine, play, setting

HERE = Path(__file__).parent
FILE = HERE / "users_of_verl.py"


def listed(tmp_path: Path, *entries) -> str:
    path = tmp_path / "users.yaml"
    path.write_text(yaml.safe_dump({"interaction": list(entries)}))
    return str(path)


def user(name: str, **config):
    return envs.get("interaction")(class_name=f"{FILE}:{name}", config=config)


def rollouts(make, line="4", samples=1, **row):
    engine = ScriptedEngine(lambda text, _: f"{line(text) if callable(line) else line}<|im_end|>")
    [group] = play(engine, setting(env=make), "Guess.", samples=samples, **row)
    return group.rollouts


def test_a_file_of_users_gives_choices_by_name(tmp_path: Path):
    entry = {"name": "guess", "class_name": "some.module.Class", "config": {"hint": "Higher."}}
    found = read_interactions(listed(tmp_path, entry))
    assert found["guess"].kind == "interaction"
    assert found["guess"].kwargs == {
        "class_name": "some.module.Class",
        "config": {"hint": "Higher.", "name": "guess"},
    }


def test_names_that_are_not_given_are_those_of_verl(tmp_path: Path):
    (tmp_path / "mine.py").write_text("class GuessInteraction: ...\n")
    path = listed(tmp_path, {"class_name": "mine.py:GuessInteraction"}, {"class_name": "a.b.Slow"})
    found = read_interactions(path)
    assert list(found) == ["guess", "slow"]
    assert found["guess"].kwargs == {
        "class_name": f"{tmp_path}/mine.py:GuessInteraction",
        "config": {"name": "guess"},
    }


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "lists no interactions"),
        ([{"name": "a"}], "interaction 1.*names its class"),
        ([{"class_name": "a.B"}, "text"], "interaction 2.*names its class"),
        ([{"class_name": "a.B", "clas": 1}], "no such key"),
        ([{"class_name": "a.B", "config": [1]}], "no mapping"),
        ([{"class_name": "a.B"}, {"class_name": "c.B"}], "two interactions have this name"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_entry(tmp_path: Path, entries, said: str):
    with pytest.raises(UserError, match=f"(?s){said}"):
        read_interactions(listed(tmp_path, *entries))


@pytest.mark.parametrize("text", ["interaction: [", "- 1", "", "\x00"])
def test_a_file_that_is_no_list_of_users_is_said(tmp_path: Path, text: str):
    path = tmp_path / "users.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"cannot be read|lists no interactions"):
        read_interactions(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        read_interactions(str(tmp_path / "missing.yaml"))


def test_the_user_answers_scores_turns_and_is_let_go():
    def line(text: str) -> str:
        return "7" if "Higher." in text else "4"

    asked = {"name": "guess", "ground_truth": "7"}
    made = user("GuessInteraction", hint="Higher.", worth=2.0)
    simulator = made._made
    for rollout in rollouts(
        lambda _: user("GuessInteraction", hint="Higher.", worth=2.0),
        line,
        samples=3,
        interaction_kwargs=asked,
    ):
        assert [m["content"] for m in rollout.messages] == ["4", "Higher.", "7"]
        assert rollout.given == ((0, 0.0), (1, 2.0))
        assert rollout.stop == StopReason.ENVIRONMENT_DONE
    assert len(set(simulator.finished)) == 3, "one object, three conversations"
    assert simulator.open == {}
    _, messages, kwargs = simulator.heard[0]
    assert messages[0] == {"role": "user", "content": "Guess."}
    assert kwargs == asked, "verl hands the row over, its name included"


def test_methods_that_are_no_coroutines_are_taken_too():
    [rollout] = rollouts(lambda _: user("Slow"), interaction_kwargs={"ground_truth": "1"})
    assert rollout.given == ((0, 0.25),)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("no start", "nobody is here"),
        ("a text", "not str"),
        ([False, "more"], "not tuple"),
        ([False, None, 0.0, {}], "gave no text"),
        ([False, 7, 0.0, {}], "gave a int"),
        ([True, "", "much", {}], "a reward is a finite number"),
        ([True, "", float("nan"), {}], "a reward is a finite number"),
    ],
)
def test_a_user_that_breaks_is_a_fault_with_a_clear_line(gives, said: str):
    [rollout] = rollouts(lambda _: user("Odd", gives=gives))
    assert (rollout.stop, rollout.given) == (StopReason.FAULT, ())
    assert said in rollout.fault


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Class", "names no module"),
        ("no_such_package.Class", "importing it failed"),
        (f"{FILE}:Gues", "has no `Gues`"),
        (f"{FILE}:Half", "no method `generate_response`"),
        (f"{FILE}:Needy", "making it failed: KeyError"),
    ],
)
def test_what_is_wrong_with_the_class_is_said(target: str, said: str):
    with pytest.raises(UserError, match=said):
        envs.get("interaction")(class_name=target)


def test_a_class_that_needs_verl_is_told_how_to_do_without(tmp_path: Path):
    path = tmp_path / "needs_verl.py"
    path.write_text("from verl.interactions.base import BaseInteraction\n")
    with pytest.raises(UserError, match="drop the import"):
        envs.get("interaction")(class_name=f"{path}:Mine")


def test_the_row_names_its_user(tmp_path: Path):
    path = listed(tmp_path, {"name": "odd", "class_name": f"{FILE}:Odd", "config": {"gives": ""}})
    worlds = EnvSelector(read_interactions(path), default=None)
    prompt = make_prompt([], extra_info={"interaction_kwargs": {"name": "odd"}})
    assert isinstance(worlds.make(prompt), interactions.Interaction)
    wrong = make_prompt([], extra_info={"interaction_kwargs": "odd"})
    with pytest.raises(UserError, match="is a mapping"):
        asyncio.run(user("Odd", gives="").open(wrong, key=1))
