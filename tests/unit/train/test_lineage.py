"""A plain run notes what it reads and what it makes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.telemetry.artifact_registry import ArtifactRegistry
from luyen.telemetry.artifacts import Artifact, difference
from tests.runs import MODEL, Ran, train


def artifacts(root: Path, kind: str) -> list[Artifact]:
    return [one for one in ArtifactRegistry(root).artifacts if one.kind == kind]


def command(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["artifacts", *map(str, words)])
    if isinstance(done.exception, UserError):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = [f"{a}+{b}=" for a in range(5) for b in range(5)]
    lines = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def ran(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    words = (f"data.train_files={rows}", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    return train(tmp_path_factory.mktemp("runs"), *words)


def root_of(ran: Ran) -> Path:
    return ran.root.parent.parent


def test_rows_and_the_model_are_noted_with_their_hashes(ran: Ran, rows: Path):
    [dataset] = artifacts(root_of(ran), "dataset")
    assert (dataset.path, dataset.used_as) == (str(rows), "data.train_files.0")
    [model] = artifacts(root_of(ran), "model")
    assert (model.name, model.used_as) == ("builtin://arithmetic", f"{MODEL}.path")
    assert difference(dataset) is None
    assert difference(model) is None


def test_checkpoints_are_noted_as_they_come_and_go(ran: Ran):
    first, last = artifacts(root_of(ran), "checkpoint")
    assert [one.name for one in (first, last)] == ["luyen/run/step_000001", "luyen/run/step_000002"]
    assert (first.is_retired, last.is_retired) == (True, False)
    assert difference(last) is None
    [dataset] = artifacts(root_of(ran), "dataset")
    [model] = artifacts(root_of(ran), "model")
    assert last.parents == (dataset.hash, model.hash)


def test_verify_counts_and_names_what_changed(ran: Ran, rows: Path):
    assert command("verify", root_of(ran)) == (0, "3 artifacts hashed, 0 not as noted\n")
    before = rows.read_text()
    rows.write_text(before + '{"prompt": "9+9=", "answer": "18"}\n')
    try:
        code, said = command("verify", root_of(ran))
        assert code == 1
        assert "rows.jsonl has other content" in said
        code, said = command("verify", root_of(ran), "--json")
        assert (code, [one["kind"] for one in json.loads(said)["changed"]]) == (1, ["dataset"])
    finally:
        rows.write_text(before)


def test_the_list_and_the_tree_name_parents(ran: Ran):
    [dataset] = artifacts(root_of(ran), "dataset")
    _, said = command(root_of(ran))
    assert "checkpoint (retired)" in said
    _, said = command("show", "luyen/run/step_000002", root_of(ran))
    assert said.splitlines()[0].startswith("checkpoint luyen/run/step_000002@")
    assert f"  dataset {dataset.title}" in said
    _, said = command("show", "luyen/run/step_000002", root_of(ran), "--json")
    assert json.loads(said)[0]["made_from"][0]["hash"] == dataset.hash
    with pytest.raises(UserError, match="no run below"):
        command("show", "nothing", root_of(ran))


def test_an_export_is_noted_and_read_only_as_it_was_made(ran: Ran, tmp_path: Path):
    place = ran.root / "exported"
    assert CliRunner().invoke(app, ["export", str(ran.root), str(place)]).exit_code == 0
    [made] = artifacts(root_of(ran), "export")
    [*_, checkpoint] = artifacts(root_of(ran), "checkpoint")
    assert (made.name, made.parents) == ("luyen/run", (checkpoint.hash,))
    words = (f"{MODEL}.path={place}", f"{MODEL}.init=pretrained")
    train(tmp_path / "sound", *words)
    assert artifacts(tmp_path / "sound", "export")[0].hash == made.hash
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(UserError, match="it is not as it was noted"):
        train(tmp_path / "broken", *words)
    assert not (tmp_path / "broken" / "luyen").exists(), "a run that was refused leaves nothing"


def test_an_export_elsewhere_is_read_only_as_it_was_made(ran: Ran, tmp_path: Path):
    place = tmp_path / "model"
    assert CliRunner().invoke(app, ["export", str(ran.root), str(place)]).exit_code == 0
    words = (f"{MODEL}.path={place}", f"{MODEL}.init=pretrained")
    train(tmp_path / "sound", *words)
    (place / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match=r"chat_template\.jinja was added"):
        train(tmp_path / "broken", *words)


def test_a_run_that_goes_on_notes_nothing_twice(rows: Path, tmp_path: Path):
    words = (f"data.train_files={rows}", "trainer.save_freq=1")
    ran = train(tmp_path, *words, "trainer.total_training_steps=1")
    before = (ran.root / "artifacts.jsonl").read_text().splitlines()
    train(tmp_path, *words, "trainer.total_training_steps=2")
    after = (ran.root / "artifacts.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1
