"""Recorded rollouts under another reward: what changes, and that nothing of the run does."""

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.studio.rescore import rescore
from tests.runs import CHATTY, train

VALIDATED = (
    "data.val_files=arithmetic://sum?digits=1&split=held-out&size=3",
    "trainer.test_freq=1",
)
LENGTH = "reward: {components: {brief: {rule: length}, loops: {rule: repetition, weight: 0.5}}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), *VALIDATED).root


def write(folder: Path, text: str) -> Path:
    path = folder / "new.yaml"
    path.write_text(text)
    return path


def hashes(root: Path) -> dict[str, str]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_runs_own_reward_gives_the_same_scores_and_the_run_is_untouched(run: Path):
    before = hashes(run)
    found = rescore(run)
    assert found.steps == (1, 2)
    assert found.count == 32
    assert [g.scores for g in found.old] == [g.scores for g in found.new]
    assert all(change.tau in (None, 1.0) for _, change in found.changes())
    assert found.moved() == []
    assert hashes(run) == before


def test_another_reward_takes_the_place_of_the_whole_block(run: Path, tmp_path: Path):
    found = rescore(run, file=write(tmp_path, LENGTH))
    names = {c.name: c for c in found.components()}
    assert names["reward/brief"].old is None
    for group in found.new:
        for rollout in group.rollouts:
            assert rollout.score is not None
            parts = {part.name: part.value for part in rollout.score.parts}
            assert parts["brief"] == -rollout.response_length / 6
            assert rollout.score.value == (parts["brief"] or 0) + 0.5 * (parts["loops"] or 0)
    front = found.objectives()[1].front
    assert front is not None
    assert 0 < front <= 1


def test_overrides_are_laid_over_the_block(run: Path, tmp_path: Path):
    file = write(tmp_path, LENGTH)
    weighed = rescore(run, file=file, overrides=["reward.components.brief.weight=-1.0"])
    plain = rescore(run, file=file, overrides=["reward.components.loops.weight=0.0"])
    other = rescore(
        run,
        file=file,
        overrides=["reward.components.brief.weight=-1.0", "reward.components.loops.weight=0.0"],
    )
    assert weighed.components()[0].new != plain.components()[0].new
    values = [[[s.value for s in g.scores] for g in found.new] for found in (plain, other)]
    assert values[0] == [[-(v or 0.0) for v in row] for row in values[1]]


def test_steps_and_validations_can_be_chosen(run: Path):
    assert rescore(run, steps=range(2, 3)).steps == (2,)
    held = rescore(run, is_validation=True)
    assert held.steps == (0, 1, 2)
    assert {g.prompt.extra_info["split"] for g in held.new} == {"held-out"}
    with pytest.raises(UserError, match="there are 1 to 2"):
        rescore(run, steps=range(7, 9))


def test_what_cannot_be_judged_is_counted_and_never_zero(run: Path, tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 2:\n        raise ValueError('odd')\n    return 1.0\n"
    )
    found = rescore(run, overrides=[f"reward.custom_reward_function.path={broken}"])
    texts = [r.text for g in found.new for r in g.rollouts]
    assert len(found.faults) == sum(len(text) % 2 for text in texts)
    assert 0 < len(found.faults) < found.count
    whole = found.components()[0]
    assert whole.new == 1.0
    assert whole.new_faults == len(found.faults)


def test_rows_that_changed_are_refused(run: Path, tmp_path: Path):
    lines: list[dict[str, object]] = [
        {"prompt": f"{a}+1=", "data_source": "s", "ground_truth": str(a + 1)} for a in range(8)
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    root = train(tmp_path, f"data.train_files={rows}", "data.string_prompts=user").root
    assert rescore(root).count == 32
    lines[0]["extra_info"] = {"hint": 1}
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="not those that the run began"):
        rescore(root)


def test_conversations_are_judged_with_their_calls(tmp_path: Path):
    root = train(tmp_path, *CHATTY).root
    found = rescore(
        root,
        overrides=[
            "reward.custom_reward_function.path=null",
            "reward.components={cost: {rule: tool_cost}}",
        ],
    )
    calls = {r.key: r.calls for g in found.old for r in g.rollouts}
    assert any(calls.values())
    for rollout in (r for g in found.new for r in g.rollouts):
        assert rollout.score is not None
        ran = [call for call in calls[rollout.key] if call.has_run]
        assert rollout.score.value == -len(ran)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--reward", "EMPTY"], "has no `reward` block"),
        (["--reward", "/nowhere.yaml"], "cannot be read"),
        (["data.train_batch_size=2"], "only the reward is another"),
        (["reward.components={a: {rule: exakt}}"], "exact"),
        (["--step", "x"], "steps are numbers"),
        (["--step", "9:2"], "the lower one first"),
        (["--out", "RUN/rollouts/new.jsonl"], "in the run directory"),
    ],
)
def test_what_cannot_be_done_says_why(words: list[str], says: str, run: Path, tmp_path: Path):
    empty = str(write(tmp_path, "trainer: {seed: 1}"))
    made = [w.replace("EMPTY", empty).replace("RUN", str(run)) for w in words]
    result = CliRunner().invoke(app, ["rescore", str(run), *made])
    assert result.exit_code == 2
    assert says in result.output


def test_the_command_shows_and_writes(run: Path, tmp_path: Path):
    out = tmp_path / "scores.jsonl"
    words = ["rescore", str(run), "--reward", str(write(tmp_path, LENGTH))]
    result = CliRunner().invoke(app, [*words, "--out", str(out), "--show", "2"])
    assert result.exit_code == 0, result.output
    assert "Order: Kendall's tau" in result.output
    assert "of a group on its Pareto front" in result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 32
    assert {row["new"]["parts"][0]["name"] for row in rows} == {"brief"}
    page = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert page["ok"]
    assert page["rollouts"] == 32
    assert -1 <= page["kendall_tau"] <= 1
