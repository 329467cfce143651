"""Hydra's command line and defaults lists: config groups, `~key`, `+key` and `++key`."""

from pathlib import Path
from typing import Any

import pytest

from luyen.cli.check import split_words
from luyen.config.loader.load import load
from luyen.config.loader.tree import ConfigTree


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for name, text in {
        "trainer/short.yaml": "total_epochs: 1\nsave_freq: 5\n",
        "trainer/long.yaml": "total_epochs: 9\n",
        "experiment/sums.yaml": "# @package _global_\ndata: {train_files: arithmetic://sum}\n",
        "run.yaml": "defaults: [{trainer: short}, {optional nothing: here}]\n"
        "trainer: {seed: 3}\ndata: {train_batch_size: 8}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "run.yaml"


def values(recipe: Path, *words: str) -> dict[str, Any]:
    tree = load([recipe], words)
    assert tree.problems == ()
    return tree.values


def refused(recipe: Path, *words: str) -> tuple[str, str]:
    tree: ConfigTree = load([recipe], words)
    [problem] = tree.problems
    return problem.why, problem.fix


def test_a_defaults_list_picks_the_file_of_a_group(recipe: Path):
    assert values(recipe)["trainer"] == {"total_epochs": 1, "save_freq": 5, "seed": 3}


def test_the_command_line_picks_another_in_its_place(recipe: Path):
    assert values(recipe, "trainer=long")["trainer"] == {"total_epochs": 9, "seed": 3}
    origin = load([recipe], ["trainer=long"]).origins["trainer.total_epochs"]
    assert origin.source.endswith("trainer/long.yaml")


@pytest.mark.parametrize("word", ["experiment=sums", "+experiment=sums"])
def test_a_group_that_no_list_names_is_laid_over_the_file(recipe: Path, word: str):
    data = values(recipe, word, "data.max_prompt_length=9")["data"]
    expected = {"train_files": "arithmetic://sum", "train_batch_size": 8, "max_prompt_length": 9}
    assert data == expected


def test_an_unknown_choice_is_refused_with_those_that_there_are(recipe: Path):
    why, fix = refused(recipe, "trainer=lng")
    assert "no such choice" in why
    assert fix == "did you mean `long`?"
    assert refused(recipe, "experiment=sum")[1] == "did you mean `sums`?"


def test_a_tilde_takes_back_what_a_file_says(recipe: Path):
    assert values(recipe, "~trainer.seed")["trainer"] == {"total_epochs": 1, "save_freq": 5}
    assert "data" not in values(recipe, "~data")
    assert values(recipe, "~trainer.seed=3", "trainer.seed=4")["trainer"]["seed"] == 4
    assert "cannot be taken back" in refused(recipe, "~trainer.nnodes")[0]
    assert "cannot be taken back" in refused(recipe, "~trainer.seed=7")[0]
    assert "trainer.seed" not in load([recipe], ["~trainer.seed"]).origins


@pytest.mark.parametrize("plus", ["+", "++"])
def test_plus_sets_a_key(recipe: Path, plus: str):
    assert values(recipe, f"{plus}trainer.seed=5")["trainer"]["seed"] == 5


def test_words_of_the_command_line_are_files_or_overrides():
    words = ["run.yaml", "a.b=1", "~trainer.seed", "~/run.yaml", "+a=2"]
    files, overrides = split_words(words)
    assert files == [Path("run.yaml"), Path("~/run.yaml")]
    assert overrides == ["a.b=1", "~trainer.seed", "+a=2"]
