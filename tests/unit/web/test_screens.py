"""What the screens over several files say: rewards, parity, timeline, comparison, a new run."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luyen.base.digests import BEGINNING, DigestFile, hash_value, link, page_with_checksum
from luyen.base.files import json_line
from luyen.base.records import Score, StopReason
from luyen.base.rundir import RunDirectory
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import write_rollouts
from tests.unit.studio.run_files import rollout
from tests.unit.web.server import Client, serving, until

CONFIG = """\
trainer: {stage: rl, total_training_steps: 3, experiment_name: NAME}
algorithm: {adv_estimator: ESTIMATOR}
actor_rollout_ref: {model: {path: 'builtin://arithmetic'}}
reward: {api_key: secret-of-mine}
"""


def begin(root: Path, name: str, *, estimator: str = "grpo", weights: int = 3) -> RunDirectory:
    """Three steps, whose digests of the weights differ from those of others from a step on."""
    config = CONFIG.replace("NAME", name).replace("ESTIMATOR", estimator)
    run = RunDirectory.create(root / "p" / name, config=config, provenance={}, manifest={})
    values = [
        {"reward/mean": i / 4, "reward/format/mean": i / 2, "judging/tokens": 10.0 * i,
         "parity/max_gap": i / 8, f"only/{name}": 1.0}
        for i in (1, 2, 3)
    ]  # fmt: skip
    run.metrics.write_text("".join(metrics_line(i + 1, v) for i, v in enumerate(values)))
    chain, digests = BEGINNING, DigestFile(run.digests)
    for step in (0, 1, 2, 3):  # 0: a validation before training
        stages = {"rollouts": hash_value(step), "weights": hash_value(min(step, weights))}
        digest = link(chain, step=step, stages=stages)
        digests.write(digest)
        chain = digest.chain
    digests.close()
    return run


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("runs")
    run = begin(root, "a")
    begin(root, "b", estimator="rloo", weights=2)
    begin(root, "c")
    failed = rollout(2, draw=1)
    failed = replace(
        failed,
        rollout=replace(failed.rollout, fault="ValueError: no\nmore", score=None,
                        stop=StopReason.FAULT),
        advantages=None,
    )  # fmt: skip
    write_rollouts(run.rollouts(1), [rollout(1, reward=1.0)], step=1)
    write_rollouts(run.rollouts(2), [rollout(2, reward=1.0), failed, failed], step=2)
    for step, gap in ((1, 0.25), (2, -2.0)):
        run.parity(step).parent.mkdir(exist_ok=True)
        page = {"schema": 1, "step": step, "tokens": [{"token": 7, "gap": gap}]}
        run.parity(step).write_text(page_with_checksum(page))
    run.parity(3).write_text(page_with_checksum(page).replace("-2.0", "-3.0"))
    lines = [
        {"schema": 1, "process": "controller", "pid": 5},
        {"span": "generate", "start": 100.0, "duration_s": 4.0, "step": 1},
        {"span": "update", "start": 104.0, "duration_s": 2.0, "step": 1},
        {"span": "generate", "start": 110.0, "duration_s": 5.0, "step": 2},
    ]
    (run.root / "events" / "controller-5.jsonl").write_text("".join(map(json_line, lines)))
    with serving(root) as found:
        yield found


def run_id(client: Client, name: str = "a") -> str:
    until(lambda: client.get("/runs")["is_whole"])
    return next(row["id"] for row in client.get("/runs")["runs"] if row["name"] == name)


def test_rewards_have_their_components_the_faults_and_the_judging(client: Client):
    until(lambda: client.get(f"/runs/{run_id(client)}/rewards")["faults"])
    page = client.get(f"/runs/{run_id(client)}/rewards")
    assert [(one["name"], one["metric"]) for one in page["components"]] == [
        ("reward", "reward/mean"),
        ("format", "reward/format/mean"),
    ]
    assert page["components"][1]["series"]["value"] == [0.5, 1.0, 1.5]
    assert page["faults"] == [{"step": 2, "name": "ValueError: no", "count": 2, "sample": 1}]
    assert page["judging"]["judging/tokens"]["value"] == [10.0, 20.0, 30.0]


def test_what_judges_said_is_shown_with_the_answers_that_they_judged(tmp_path: Path):
    run = begin(tmp_path, "a")
    for step in range(1, 4):
        one = rollout(step)
        told = Score(name="clear", value=0.7, raw=7.0, seconds=1.5, reply=f"Score: 7 <b>{step}</b>")
        lost = Score(name="kind", value=None, error="judge unparsable: no numbers", reply="Fine.")
        style = Score(name="style", value=0.7, parts=(told, lost))
        score = Score(name="reward", value=0.7, parts=(style, Score(name="right", value=1.0)))
        scored = replace(one, rollout=replace(one.rollout, score=score))
        write_rollouts(run.rollouts(step), [rollout(step, sample=1), scored], step=step)
    with serving(tmp_path) as client:
        answers = client.get(f"/runs/{run_id(client)}/rewards")["judges"]
        page = client.get(f"/runs/{run_id(client)}/rollouts/train/3/0")
    assert [(one["step"], one["component"], one["score"]) for one in answers] == [
        (step, *rest) for step in (3, 2, 1) for rest in (("style/clear", 7.0), ("style/kind", None))
    ]
    assert answers[0] == {
        "step": 3, "index": 0, "component": "style/clear", "score": 7.0, "seconds": 1.5,
        "fault": None, "answer": "a", "reply": "Score: 7 <b>3</b>",
    }  # fmt: skip
    assert (answers[1]["fault"], answers[1]["reply"]) == ("judge unparsable: no numbers", "Fine.")
    [style, right] = page["reward_tree"]["children"]
    assert [part["reply"] for part in style["children"]] == ["Score: 7 <b>3</b>", "Fine."]
    assert right["reply"] is None


def test_a_score_tree_that_is_damaged_or_hostile_has_no_answers_of_judges(tmp_path: Path):
    deep = '{"name": "a", "parts": [' * 150 + '{"reply": "x"}' + "]}" * 150
    trees = ["{", '["reply"]', '{"name": "a", "reply": 7}', '{"parts": 3, "reply": null}', deep,
             '{"name": "kept", "value": "nan", "seconds": [], "reply": "Score: 1"}']  # fmt: skip
    run = begin(tmp_path, "a")
    table = pa.table({"score": trees, "text": [None] * len(trees)})
    run.rollouts(1).parent.mkdir(exist_ok=True)
    pq.write_table(table, run.rollouts(1))
    run.rollouts(2).write_bytes(b"PAR1")
    with serving(tmp_path) as client:
        answers = until(lambda: client.get(f"/runs/{run_id(client)}/rewards")["judges"])
    [only] = answers
    assert (only["component"], only["score"], only["seconds"]) == ("kept", None, None)
    assert (only["answer"], only["reply"]) == ("", "Score: 1")


def test_parity_has_the_gap_over_time_and_the_worst_tokens_first(client: Client):
    page = client.get(f"/runs/{run_id(client)}/parity")
    assert page["series"]["parity/max_gap"]["value"] == [0.125, 0.25, 0.375]
    assert page["worst"] == [
        {"step": 2, "token": 7, "gap": -2.0},
        {"step": 1, "token": 7, "gap": 0.25},
    ]
    assert [one["file"] for one in page["damage"]] == ["step_000003.json"]


def test_the_timeline_has_lanes_versions_and_gaps(client: Client):
    page = client.get(f"/runs/{run_id(client)}/timeline")
    assert (page["problem"], page["steps"], page["known_steps"]) == (None, [1, 2], [1, 2])
    [lane] = page["lanes"]
    assert (lane["role"], lane["left_out"]) == ("controller", 0)
    spans = [(one["name"], one["start"], one["end"], one["step"]) for one in lane["spans"]]
    assert spans == [
        ("generate", 0.0, 4.0, 1),
        ("update", 4.0, 6.0, 1),
        ("generate", 10.0, 15.0, 2),
    ]
    assert page["versions"] == [{"time": 6.0, "version": 1}]
    assert (page["origin"], page["seconds"]) == (100.0, 15.0)
    first = client.get(f"/runs/{run_id(client)}/timeline?start=1&end=1")
    assert [one["step"] for one in first["lanes"][0]["spans"]] == [1, 1]
    absent = client.get(f"/runs/{run_id(client)}/timeline?start=7&end=9")
    assert (absent["lanes"], "steps 7 to 9" in absent["problem"]) == ([], True)


def test_a_comparison_has_changed_keys_common_metrics_and_the_first_divergence(client: Client):
    a, b, c = (run_id(client, name) for name in "abc")
    page = client.get(f"/compare?id={a}&id={b}")
    assert [row["name"] for row in page["runs"]] == ["a", "b"]
    assert page["config"] == [
        {"key": "algorithm.adv_estimator", "values": {a: "grpo", b: "rloo"}}
    ]  # the names of the runs are no difference
    assert "reward/mean" in page["names"]
    assert not {"only/a", "only/b"} & set(page["names"])
    found = page["divergence"]
    assert (found["step"], found["stage"], found["equal_steps"]) == (3, "weights", 2)
    same = client.get(f"/compare?id={a}&id={c}")
    assert same["config"] == []
    assert (same["divergence"]["step"], same["divergence"]["equal_steps"]) == (None, 3)
    assert "secret-of-mine" not in json.dumps(page)
    assert client.ask(f"/api/v1/compare?id={a}").status == 422
    assert client.ask(f"/api/v1/compare?id={a}&id=none-00000000").status == 404


def test_a_step_that_differs_earlier_in_a_third_run_is_named(client: Client, tmp_path: Path):
    begin(tmp_path, "a")
    begin(tmp_path, "b", weights=2)
    begin(tmp_path, "c", weights=1)
    with serving(tmp_path) as other:
        ids = [run_id(other, name) for name in "abc"]
        page = other.get("/compare?" + "&".join(f"id={one}" for one in ids))
    assert page["divergence"]["step"] == 2
    assert page["divergence"]["message"].startswith("p/c differs from p/a in step 2")


def test_runs_without_common_digests_are_not_called_equal(tmp_path: Path):
    first = begin(tmp_path, "a")
    begin(tmp_path, "b").digests.unlink()
    begin(tmp_path, "c").digests.write_bytes(first.digests.read_bytes()[:-40] + b"}\n{\n")
    begin(tmp_path, "d").digests.write_text("")
    with serving(tmp_path) as other:
        ids = {name: run_id(other, name) for name in "abcd"}
        found = {
            name: other.get(f"/compare?id={ids['a']}&id={ids[name]}")["divergence"]
            for name in "bcd"
        }
    assert (found["b"]["step"], found["b"]["equal_steps"]) == (None, 0)
    assert found["b"]["message"].startswith("p/b: it is missing")
    assert (found["d"]["step"], found["d"]["equal_steps"]) == (None, 0)
    assert found["d"]["message"] == "No step has a digest in all of these runs."
    assert (found["c"]["step"], found["c"]["equal_steps"]) == (None, 0)
    assert found["c"]["message"].startswith("p/c: ")


def test_the_schema_documents_every_key(client: Client):
    page = client.get("/schema")
    keys = {one["key"]: one for one in page["keys"]}
    assert keys["algorithm.adv_estimator"]["help"]
    assert keys["data.truncation"]["choices"][:3] == ["error", "left", "right"]
    assert keys["trainer.seed"]["default"] == 0
    assert "algorithm" in page["schema"]["properties"]


def test_recipes_begin_with_the_quickstart_and_pass_the_check(client: Client):
    found = client.get("/recipes")
    assert found[0]["name"] == "quickstart"
    assert all(one["title"] and one["yaml"] for one in found)
    reply = client.post("/check", {"yaml": found[0]["yaml"], "overrides": []})
    assert reply.status == 200
    assert reply.json["ok"], reply.json["findings"]
    assert reply.json["plan"]["lines"]
    assert reply.json["plan"]["memory"][0]["total"] > 0


def test_files_that_a_recipe_names_are_found_from_anywhere(client: Client):
    found = {one["name"]: one["yaml"] for one in client.get("/recipes")}
    assert "grpo" in found
    assert not [name for name in found if name.startswith("pipeline")]
    for name, text in found.items():
        page = client.post("/check", {"yaml": text, "overrides": []}).json
        assert "C003" not in [one["rule"] for one in page["findings"]], name


def test_a_check_names_what_is_wrong_and_writes_the_command(client: Client):
    text = "data: {train_batch_size: -3}\nalgorithm: {adv_estimatr: grpo}\n"
    page = client.post("/check", {"yaml": text, "overrides": []}).json
    assert not page["ok"]
    named = {one["key"]: one for one in page["findings"]}
    assert {"data.train_batch_size", "algorithm.adv_estimatr"} <= set(named)
    assert named["algorithm.adv_estimatr"]["origin"].startswith("run.yaml")
    broken = client.post("/check", {"yaml": "a: [", "overrides": []}).json
    assert (broken["ok"], len(broken["findings"])) == (False, 1)
    words = ["trainer.logger=[console, jsonl]", "trainer.experiment_name=a; b"]
    page = client.post("/check", {"yaml": client.get("/recipes")[0]["yaml"], "overrides": words})
    assert page.json["command"] == (
        "luyen train run.yaml 'trainer.logger=[console, jsonl]' 'trainer.experiment_name=a; b'"
    )
    assert page.json["config"]["trainer"]["experiment_name"] == "a; b"
