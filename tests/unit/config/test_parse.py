"""Unknown keys, wrong types, keys of verl: each gets its own answer, all in one report."""

import random

import pytest

from luyen.config.fields import all_blocks, all_fields
from luyen.config.loader.load import load
from luyen.config.loader.parse import parse
from luyen.config.loader.tree import ConfigTree, nested
from luyen.config.problem import Problem

LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def found(*overrides: str) -> list[Problem]:
    tree = load([], list(overrides))
    return [*tree.problems, *parse(tree).problems]


def edited(word: str, draw: random.Random) -> str:
    """One character inserted, deleted, replaced or swapped with its neighbour."""
    at = draw.randrange(len(word))
    letter = draw.choice(LETTERS)
    forms = [
        word[:at] + letter + word[at:],
        word[:at] + word[at + 1 :],
        word[:at] + letter + word[at + 1 :],
        word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
    ]
    return draw.choice(forms)


def edits(count: int) -> list[tuple[str, str]]:
    """Pairs of a key and a misspelling of one of its parts that is not itself a key."""
    draw = random.Random(20260101)
    paths = list(all_fields())
    known = {*all_fields(), *all_blocks()}
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        parts = draw.choice(paths).split(".")
        at = draw.randrange(len(parts))
        wrong = ".".join([*parts[:at], edited(parts[at], draw)])
        right = ".".join(parts[: at + 1])
        if wrong.rpartition(".")[2] and wrong not in known:
            pairs.append((right, wrong))
    return pairs


def test_of_2000_misspelt_keys_every_one_is_refused_and_99_percent_are_understood() -> None:
    misunderstood = []
    long_keys = 0
    for right, wrong in edits(2000):
        value = all_fields()[right].default if right in all_fields() else {}
        problems = parse(ConfigTree(values=nested(wrong.split("."), value), origins={})).problems
        assert problems, f"{wrong} was accepted"
        assert all(p.severity == "error" for p in problems)
        if len(right.rpartition(".")[2]) >= 4:
            long_keys += 1
            if not problems[0].fix.startswith(f"did you mean `{right}`"):
                misunderstood.append((wrong, problems[0].fix))
    assert long_keys > 1500
    assert len(misunderstood) <= long_keys // 100, misunderstood


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("trainer.nnodes=two", "a whole number, >= 1 and <= 100000"),
        ("trainer.nnodes=0", "a whole number, >= 1 and <= 100000"),
        ("trainer.nnodes=1.5", "a whole number, >= 1 and <= 100000"),
        ("trainer.nnodes=true", "a whole number, >= 1 and <= 100000"),
        ("data.return_raw_chat=yes", "true or false"),
        ("actor_rollout_ref.rollout.top_p=1.5", "a number, > 0 and <= 1"),
        ("trainer.logger=[console, 3]", "a list of strings"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "a list of 2 numbers"),
        ("algorithm.gamma=.nan", "a number, >= 0 and <= 1"),
        ("trainer.nnodes={a: 1}", "a whole number, >= 1 and <= 100000"),
    ],
)
def test_a_wrong_value_says_what_was_expected(override: str, kind: str) -> None:
    problems = found(override)
    assert [p.id for p in problems] == ["C006"]
    assert problems[0].why == f"expected {kind}"


def test_a_wrong_word_offers_the_right_one() -> None:
    assert found("data.truncation=lfet")[0].fix == "did you mean `left`?"
    assert "`path` for verl's `resume_path`" in found("trainer.resume_mode=resume_path")[0].fix


def test_a_value_where_a_block_belongs_is_refused_and_an_empty_block_is_not() -> None:
    assert [p.id for p in found("trainer=3")] == ["C006"]
    assert found("critic=null") == []


def test_an_open_value_is_reported_as_missing() -> None:
    assert [(p.id, p.field) for p in found("data.train_files=???")] == [
        ("C004", "data.train_files")
    ]


def test_what_is_wrong_stands_at_its_default_so_that_rules_can_go_on() -> None:
    config = parse(load([], ["trainer.nnodes=x", "trainer.save_freq=7"])).config
    assert (config.trainer.nnodes, config.trainer.save_freq) == (1, 7)


def test_a_verl_key_is_refused_with_the_nearest_thing() -> None:
    (problem,) = found("actor_rollout_ref.actor.grad_clip=1.0")
    assert problem.id == "C007"
    assert "actor_rollout_ref.actor.optim.clip_grad" in problem.fix


def test_a_verl_block_is_refused_key_by_key() -> None:
    body = "actor_rollout_ref.ref.fsdp_config={param_offload: true, fsdp_size: -1}"
    assert [p.field.rpartition(".")[2] for p in found(body)] == ["param_offload", "fsdp_size"]


def test_a_moot_verl_key_is_accepted_at_the_value_we_implement_only() -> None:
    assert found("actor_rollout_ref.hybrid_engine=true") == []
    (problem,) = found("actor_rollout_ref.hybrid_engine=false")
    assert problem.id == "C010"
    assert found("actor_rollout_ref.hybrid_engine=1")[0].id == "C010"


def test_a_key_in_the_wrong_block_names_the_right_one() -> None:
    assert (
        "`actor_rollout_ref.rollout.gpu_memory_utilization`"
        in found("trainer.gpu_memory_utilization=0.5")[0].fix
    )


def test_hydra_settings_are_named_and_left_aside() -> None:
    problems = found("hydra.searchpath=[x]", "actor_rollout_ref.actor._target_=verl.X")
    assert [(p.id, p.severity) for p in problems] == [("C012", "warning")] * 2
