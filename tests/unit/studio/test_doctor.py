"""`luyen doctor` as a user calls it: live, damaged and healthy runs, exit codes, what to try."""

import json
from pathlib import Path

from luyen.base.rundir import RunDirectory
from luyen.studio.doctor.diagnose import RULES, diagnose
from luyen.studio.doctor.findings import (
    SEVERITIES,
    STAGES,
    more_exploration,
    slower_critic,
    smaller_updates,
)
from luyen.studio.doctor.record import read_run
from tests.e2e.tiny import luyen
from tests.unit.studio.run_files import rollout, write_run, write_steps

SICK = {"actor/pg_clipfrac": [0.9] * 6, "actor/lr": [0.0] * 6}


def test_a_quiet_run_gives_0_and_a_sick_one_1(tmp_path: Path):
    quiet = luyen("doctor", write_run(tmp_path / "quiet", {"reward/mean": [0.5] * 6}))
    assert quiet.exit_code == 0
    assert f"No findings ({len(RULES)} rules)" in quiet.output
    sick = luyen("doctor", write_run(tmp_path / "sick", SICK))
    assert sick.exit_code == 1
    assert "error learning-rate" in sick.output
    assert "Try first: look at actor_rollout_ref.actor.optim" in sick.output
    assert sick.output.index("learning-rate") < sick.output.index("clip-saturation")


def test_a_note_alone_gives_0(tmp_path: Path):
    done = luyen("doctor", write_run(tmp_path / "run", {"reward/mean": [0.5] * 30}))
    assert done.exit_code == 0
    assert "note no-validation" in done.output


def test_what_is_no_run_gives_2(tmp_path: Path):
    for place in (tmp_path, tmp_path / "nowhere"):
        done = luyen("doctor", place)
        assert done.exit_code == 2
        assert "no run was begun there" in done.output


def test_the_report_is_data_too(tmp_path: Path):
    done = luyen("doctor", write_run(tmp_path / "run", SICK), "--json")
    page = json.loads(done.stdout)
    assert (page["ok"], page["last_step"], page["rules"]) == (False, 6, len(RULES))
    first = page["findings"][0]
    assert (first["rule"], first["severity"], first["steps"]) == (
        "learning-rate",
        "error",
        [1, 2, 3, 4, 5, 6],
    )
    assert page["try_first"] == first["try"]


def test_a_run_that_has_just_begun_and_one_whose_last_line_is_torn_are_read(tmp_path: Path):
    assert luyen("doctor", write_run(tmp_path / "new", {})).exit_code == 0
    (tmp_path / "new" / "metrics.jsonl").unlink()
    assert luyen("doctor", tmp_path / "new").exit_code == 0
    live = write_run(tmp_path / "live", SICK)
    with (live / "metrics.jsonl").open("a") as file:
        file.write('{"actor/lr": 0.1, "st')
    assert "learning-rate" in luyen("doctor", live).output


def test_damage_is_named_and_the_rest_is_still_judged(tmp_path: Path):
    root = write_run(tmp_path / "run", SICK)
    write_steps(root, [rollout(1), rollout(2, version=0)])
    file = RunDirectory(root).rollouts(1)
    file.write_bytes(file.read_bytes()[:40])
    (root / "config.yaml").write_text("trainer: {nnodes: many}")
    said = luyen("doctor", root).output
    assert "rollouts/step_000001.parquet: it cannot be read" in said
    assert "config.yaml: trainer.nnodes: expected" in said
    assert "learning-rate" in said
    assert "stale-weights" in said


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path):
    root = write_run(tmp_path / "run", SICK)
    text = (root / "metrics.jsonl").read_text().splitlines()
    for line, word in (("{nonsense", "line 3 is damaged"), ('{"a": 1}', "step")):
        (root / "metrics.jsonl").write_text("\n".join([*text[:2], line, *text[3:]]) + "\n")
        done = luyen("doctor", root)
        assert done.exit_code == 1
        assert "metrics.jsonl" in done.output
        assert word in done.output


def test_what_to_try_follows_the_order_of_tuning(tmp_path: Path):
    plain = read_run(write_run(tmp_path / "plain", {}, config="algorithm: {adv_estimator: grpo}"))
    with_critic = read_run(write_run(tmp_path / "critic", {}, config="critic: {enable: true}"))
    assert smaller_updates(plain).stage == "clip and KL"
    assert "use_kl_loss=true" in smaller_updates(plain).change
    assert more_exploration(plain).change.endswith("clip_ratio_high=0.28")
    changes = [smaller_updates(with_critic).change, *smaller_updates(with_critic).then]
    rates = [change for change in changes if "optim.lr=" in change]
    assert [rate.split(".")[0] for rate in rates] == ["critic", "actor_rollout_ref"]
    assert changes[-1].endswith("loss_mode=gspo")
    assert "critic.optim.lr=5e-06" in slower_critic(with_critic).then


def test_a_rung_that_is_taken_is_not_proposed_again(tmp_path: Path):
    config = (
        "actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.1, clip_ratio: 0.1, "
        "optim: {lr: 1.0e-4, lr_warmup_steps: 5}}}\nalgorithm: {adv_estimator: grpo}"
    )
    tried = smaller_updates(read_run(write_run(tmp_path / "run", {}, config=config)))
    assert (tried.stage, tried.change) == (
        "learning rate",
        "actor_rollout_ref.actor.optim.lr=5e-05",
    )


def test_findings_are_sorted_by_severity_and_then_by_stage(tmp_path: Path):
    courses = SICK | {"group/kept_fraction": [0.1] * 6, "actor/skipped_updates": [1] * 6}
    found = diagnose(read_run(write_run(tmp_path / "run", courses)))
    ranks = [f.rank for f in found]
    assert ranks == sorted(ranks)
    assert {f.severity for f in found} <= set(SEVERITIES)
    assert [STAGES[stage] for _, stage in ranks] == ["repair", "data", "clip and KL", "clip and KL"]


def test_every_rule_says_what_it_looks_for():
    for rule in RULES.values():
        assert rule.title.endswith(".")
        assert rule.id == rule.id.lower()
        assert " " not in rule.id


def test_the_page_lists_every_rule_as_it_is():
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    for rule in RULES.values():
        assert f"| `{rule.id}` | {rule.severity} | {rule.title} |" in page
    assert page.count("\n| `") == len(RULES)


def test_rules_that_lack_steps_are_named(tmp_path: Path):
    root = write_run(tmp_path / "run", {"reward/mean": [0.5] * 3})
    said = luyen("doctor", root).output
    [five] = [line for line in said.splitlines() if line.startswith("Not judged before step 5: ")]
    assert {"truncation", "reward-all-equal"} <= set(five.partition(": ")[2].split(", "))
    page = json.loads(luyen("doctor", root, "--json").stdout)
    assert page["too_few_steps"]["truncation"] == 5
    assert "learning-rate" not in page["too_few_steps"]
    whole = write_run(tmp_path / "whole", {"reward/mean": [0.5] * 40})
    assert "Not judged" not in luyen("doctor", whole).output
