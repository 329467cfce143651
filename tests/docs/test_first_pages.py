"""The quickstart page is followed in an empty folder; the Vietnamese pages say the same."""

import re
import shlex
from pathlib import Path

import pytest

from tests.architecture.pages import blocks, links, pages
from tests.architecture.tree import ROOT
from tests.e2e.tiny import luyen

FIRST = ("index.md", "quickstart.md", "own_task.md")
PAGES = dict(pages())
FEW = ("trainer.total_training_steps=2", "trainer.test_freq=2", "data.train_batch_size=8")
"""What makes the quickstart short: given last, it holds."""


def page_commands(text: str) -> list[list[str]]:
    """The `luyen` commands of the shell blocks, in order."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("luyen ")]


def test_the_quickstart_page_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    called = page_commands(PAGES["docs/quickstart.md"])
    assert [words[0] for words in called] == [
        *("train", "report", "doctor", "eval", "init", "check", "train", "check", "explain")
    ]
    for words in called:
        more = FEW if words == ["train"] else ()
        mini = ("actor_rollout_ref.actor.ppo_mini_batch_size=8",) if more else ()
        done = luyen(*words, *more, *mini)
        is_mistake = words[0] == "check" and "actor_rollout_ref.rollout.n=1" in words
        # Of a run of two steps the doctor may say that it is too short.
        assert done.exit_code == int(is_mistake), f"{words}: {done.output}"
    run = tmp_path / "runs" / "luyen" / "quickstart"
    assert (run / "report.html").is_file()
    [listing] = blocks(PAGES["docs/quickstart.md"], "text")
    named = re.findall(r"^  (\S+?)/? ", listing, re.MULTILINE)
    assert len(named) >= 5
    absent = [name for name in named if not (run / name).exists()]
    assert set(absent) <= {"report"}  # runs of the test process draw no curves
    assert (tmp_path / "runs" / "starter" / "first" / "metrics.jsonl").is_file()


@pytest.mark.parametrize("name", FIRST)
def test_a_vietnamese_page_has_the_code_and_the_links_of_the_english_one(name: str):
    english, vietnamese = PAGES[f"docs/{name}"], PAGES[f"docs/vi/{name}"]
    for language in ("sh", "python", "yaml", "json"):
        assert blocks(vietnamese, language) == blocks(english, language)

    def targets(text: str, folder: Path) -> set[str]:
        found = {(folder / link).resolve().relative_to(ROOT).as_posix() for link in links(text)}
        return {path.replace("docs/vi/", "docs/") for path in found}

    assert targets(vietnamese, ROOT / "docs" / "vi") == targets(english, ROOT / "docs")
