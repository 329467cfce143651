"""`luyen report`: every section, every state of a run, and no text of a policy that is markup."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, Score, ToolCall
from luyen.base.rundir import RunDirectory
from luyen.studio.report.page import write_report
from luyen.telemetry.rollout_files import RecordedRollout
from tests.e2e.tiny import luyen
from tests.unit.studio.run_files import rollout, write_run, write_steps

SECTIONS = (
    "curves",
    "findings",
    "plan",
    "reward",
    "parity",
    "time",
    "samples",
    "digests",
    "checkpoints",
    "resumptions",
    "facts",
)
COURSES = {
    "reward/mean": [0.1, 0.2, 0.3],
    "reward/exact/mean": [0.1, 0.2, 0.3],
    "parity/max_gap": [0.0, 1e-6, math.nan],
    "time/generate": [1.0, 2.0, 1.0],
    "time/update": [0.5, 0.5, 0.5],
}
EVIL = '<script>alert("x")</script> & <img src=x onerror=y>'


class Tags(HTMLParser):
    """The elements of a page, and whether they are nested as they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(path: Path) -> tuple[str, Tags]:
    tags = Tags()
    tags.feed(path.read_text())
    assert tags.open == []
    return path.read_text(), tags


def report(root: Path) -> tuple[str, Tags]:
    text, tags = read(write_report(root))
    assert {a.get("id") for tag, a in tags.found if tag == "section"} == set(SECTIONS)
    assert all(tag not in ("script", "img", "link", "iframe") for tag, _ in tags.found)
    assert not any("src" in a or a.get("href", "#")[0] != "#" for _, a in tags.found)
    return text, tags


def test_a_run_with_numbers_has_curves_and_a_verdict(tmp_path: Path):
    root = write_run(tmp_path / "run", COURSES, config="trainer: {total_training_steps: 3}")
    text, tags = report(root)
    assert "Finished: all 3 steps." in text
    assert "Reward went from 0.1 to 0.3" in text
    assert "Largest gap of any step: 1e-06." in text
    assert sum(tag == "svg" for tag, _ in tags.found) == 5
    assert "step 3: parity/max_gap nan" in text
    assert "step 2\nreward/mean 0.2" in text
    assert "Not measured in this run: Validation" in text
    assert re.search("generate</span><span[^>]*>73%</span><span[^>]*>4.0 s<", text)
    assert "prefers-color-scheme:dark" in text


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path):
    root = write_run(tmp_path / "run", COURSES)
    assert luyen("report", root).exit_code == 0
    assert (root / "report.html").is_file()
    assert luyen("report", root, "-o", tmp_path / "new" / "a.html").exit_code == 0
    assert (tmp_path / "new" / "a.html").is_file()
    done = luyen("report", root, "-o", root)
    assert isinstance(done.exception, UserError)


def test_a_run_that_has_just_begun_says_what_is_missing(tmp_path: Path):
    text, _ = report(write_run(tmp_path / "run", {}))
    for words in (
        "has not finished a step",
        "no rewards",
        "no rollouts",
        "No chain of digests",
        "no checkpoint",
        "never resumed",
        "was not recorded",
    ):
        assert words in text


def test_a_supervised_run_is_shown(tmp_path: Path):
    courses = {"sft/nll": [2.0, 1.0], "sft/val_nll": [2.0, 1.5], "time/update": [1.0, 1.0]}
    text, _ = report(write_run(tmp_path / "run", courses, config="trainer: {stage: sft}"))
    assert "Negative log-likelihood went from 2 to 1" in text
    assert "Stage sft: 1024 rows a step" in text


def test_what_a_policy_and_a_user_wrote_is_text(tmp_path: Path):
    config = "trainer: {experiment_name: '<b>run</b>'}"
    root = write_run(tmp_path / "run", COURSES, config=config)
    one = rollout(1, sample=0, reward=1.0)
    call = ToolCall(turn=0, name=EVIL, status=CallStatus.OK, result=EVIL)
    score = Score(name=EVIL, value=1.0, error=EVIL)
    made = replace(one.rollout, score=score, fault=EVIL, calls=(call,))
    write_steps(root, [RecordedRollout(rollout=made, advantages=one.advantages)])
    run = RunDirectory(root)
    run.note_resumption(
        {"checkpoint": None, "is_config_new": True, "changed": {}, "command": [EVIL]}
    )
    text, _ = report(root)
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;run" in text


def test_samples_show_tokens_by_advantage_and_the_tree_of_scores(tmp_path: Path):
    root = write_run(tmp_path / "run", COURSES)
    long = rollout(2, answer=[61] * 900, reward=0.5)
    write_steps(root, [rollout(1, reward=0.0), rollout(1, sample=1, reward=1.0), long])
    text, tags = report(root)
    classes = [a["class"] for tag, a in tags.found if tag == "span" and a.get("class")]
    # the best rollout has the advantage 1, the largest of its tokens
    assert "s1 above4" in classes
    assert "best" in text
    assert "worst" in text
    assert "tokens left out" in text
    assert re.search(r"id 61, sampled, turn 0, logp -0.5000, advantage 1", text)
    assert '<span>reward</span><strong class="num">1</strong>' in text


def test_many_steps_make_no_large_page(tmp_path: Path):
    course = [math.sin(i / 50) for i in range(5000)]
    root = write_run(tmp_path / "run", dict.fromkeys(COURSES, course))
    place = write_report(root)
    assert place.stat().st_size < 600_000


def test_damage_is_named_on_the_page_and_a_damaged_manifest_is_an_error(tmp_path: Path):
    root = write_run(tmp_path / "run", COURSES)
    config = root / "config.yaml"
    config.write_text(config.read_text() + "# more\n")
    text, _ = report(root)
    assert "Cannot be read: config.yaml: it is not as it was written" in text
    assert "what the run was told is not known" in text
    manifest = root / "manifest.json"
    manifest.write_text(manifest.read_text().replace("run_id", "run_ie"))
    with pytest.raises(UserError, match=r"manifest\.json"):
        write_report(root)
