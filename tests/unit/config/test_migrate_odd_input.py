"""Odd input of `luyen migrate`: refused with a name, or in the table; never a traceback."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from luyen.base.errors import UserError
from luyen.config.migrate.migrate import migrate
from luyen.config.migrate.reader import MigrationRequest
from luyen.config.migrate.report import Migration, migration_json, table_lines, yaml_text

HEAD = "python3 -m verl.trainer.main_ppo"
GRPO = {"model_name_or_path": "org/model", "dataset_name": "org/rows", "num_generations": 4}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def from_yaml(values: dict[str, Any]) -> Migration:
    Path("config.yaml").write_text(yaml.safe_dump(values))
    return migrate(MigrationRequest(text="config.yaml"))


def columns(migration: Migration) -> dict[str, str]:
    return {one.source: one.column for one in migration.entries if not one.is_default}


def test_files_that_cannot_be_read_are_named():
    Path("binary.yaml").write_bytes(bytes(range(256)))
    for source in ("binary.yaml", "trl dpo --model_name_or_path a/b --config gone.yaml"):
        with pytest.raises(UserError, match="cannot be read"):
            migrate(MigrationRequest(text=source))


def test_sizes_below_one_are_refused():
    with pytest.raises(UserError, match="per_device_train_batch_size"):
        from_yaml({**GRPO, "per_device_train_batch_size": -1})
    assert columns(from_yaml({**GRPO, "max_steps": math.inf}))["max_steps"] == "unavailable"


def test_every_file_of_a_dataset_is_named():
    rows = {"path": "json", "ds_type": "json", "data_files": ["a.jsonl", "b.jsonl"]}
    found = from_yaml({"base_model": "org/model", "datasets": [rows]})
    assert found.keys["data.train_files"] == ["a.jsonl", "b.jsonl"]


def test_groups_and_deletions_of_hydra_are_in_the_table():
    words = "data.train_batch_size=3 model_engine=other ~trainer.nnodes"
    found = migrate(MigrationRequest(text=f"{HEAD} {words}"))
    assert columns(found) == {
        "data.train_batch_size": "carried",
        "model_engine": "unavailable",
        "~trainer.nnodes": "unavailable",
        "model": "unavailable",
    }


def test_a_script_with_several_training_commands_says_which_one_is_taken():
    Path("run.sh").write_text(f"{HEAD} trainer.nnodes=2\n{HEAD} trainer.nnodes=3\n")
    found = migrate(MigrationRequest(text="run.sh"))
    assert found.where == "run.sh, the last of 2 commands"
    assert found.keys["trainer.nnodes"] == 3


def test_a_broken_dataset_info_is_refused():
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text("[1]")
    values = {"stage": "sft", "model_name_or_path": "org/model", "dataset": "a"}
    with pytest.raises(UserError, match="no mapping"):
        from_yaml({**values, "finetuning_type": "full"})


def test_names_of_files_print_no_terminal_codes():
    name = "run\x1b[31m.sh"
    Path(name).write_text(f"{HEAD} trainer.nnodes=2 trainer.experiment_name='\x9b31m'\n")
    found = migrate(MigrationRequest(text=name))
    text = yaml_text(found)
    assert yaml.safe_load(text)["trainer"]["nnodes"] == 2
    printed = "\n".join((text, *table_lines(found)))
    assert not {"\x1b", "\x9b"} & set(printed)


def test_a_python_file_that_computes_too_much_is_named():
    Path("deep.py").write_text("from trl import GRPOConfig\nx = " + "+".join(["1"] * 20_000))
    with pytest.raises(UserError, match=r"nested too deeply|no Python"):
        migrate(MigrationRequest(text="deep.py"))
    doubled = "a = 'xxxxxxxxxx'\n" + "a = a + a\n" * 60 + "a = f'{a}{a}'\n" * 60
    number = "1" + "0" * 400
    text = f"from trl import GRPOConfig\n{doubled}GRPOConfig(run_name=a, beta={number} / 3)\n"
    Path("grow.py").write_text(text)
    found = columns(migrate(MigrationRequest(text="grow.py")))
    assert found == dict.fromkeys(("run_name", "beta", "model"), "unavailable")


def test_a_further_dataset_of_a_script_is_named():
    Path("run.py").write_text(
        "from trl import SFTConfig\nSFTConfig(seed=1)\n"
        "train = load_dataset('org/rows', split='train')\n"
        "again = load_dataset('org/rows', split='train')\n"
        "test = load_dataset('org/rows', split='test')\n"
    )
    found = migrate(MigrationRequest(text="run.py"))
    [more] = [one for one in found.entries if one.source == "load_dataset"]
    assert (more.value, more.column) == ("load_dataset('org/rows', split='test')", "unavailable")


@pytest.mark.parametrize(
    ("how", "estimator"), [("normalize_then_sum", "gdpo"), ("sum_then_normalize", "grpo")]
)
def test_rewards_that_are_normalised_one_by_one_are_gdpo(how: str, estimator: str):
    found = from_yaml({**GRPO, "multi_objective_aggregation": how})
    assert found.keys["algorithm.adv_estimator"] == estimator


def test_devices_of_a_critic_that_is_not_there_have_no_effect():
    text = f"{HEAD} algorithm.adv_estimator=grpo critic.nnodes=2"
    found = migrate(MigrationRequest(text=text))
    assert columns(found)["critic.nnodes"] == "implied"
    assert "critic.nnodes" not in found.keys


def test_a_password_of_an_address_is_in_no_column_of_the_table():
    address = "https://me:hunter2@host/x"
    migration = from_yaml({**GRPO, "output_dir": address, "run_name": address})
    shown = "\n".join([*table_lines(migration), json.dumps(migration_json(migration))])
    assert "hunter2" not in shown
    assert "hunter2" in yaml_text(migration)


def test_a_disk_without_room_is_named_and_no_half_file_stays(tmp_path: Path):
    """In a process of its own, which may not write a file of that size."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(GRPO))
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)); from luyen.cli.main import run;"
    words = ["migrate", "config.yaml", "--output", "ours.yaml"]
    code += f"import sys; sys.argv[1:] = {words}; run()"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        check=False,
    )
    assert done.returncode == 1
    assert "--output = 'ours.yaml': it could not be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ours.yaml").exists()


def test_a_reader_that_closes_standard_output_does_not_lose_the_file(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(GRPO))
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "luyen", "migrate", "config.yaml", "--output", "ours.yaml"]
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        subprocess.run(
            words,
            cwd=tmp_path,
            stdout=writing,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            check=False,
        )
    finally:
        os.close(writing)
    assert yaml.safe_load((tmp_path / "ours.yaml").read_text())["trainer"]["stage"] == "rl"
