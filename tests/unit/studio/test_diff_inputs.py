"""Inputs that differ, and which of them can explain where two runs parted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from luyen.base.digests import STAGES
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.schema.run import RunConfig
from luyen.studio.inputs import (
    ABSENT,
    ChangedInput,
    acts_on,
    changed_facts,
    changed_inputs,
    suspects,
)

FACTS: dict[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "hardware": {"processor": "one", "memory_bytes": 8, "gpus": []},
    "settings": {},
    "threads": {"torch": 1},
    "datasets": {"train": "ab"},
    "revision": {"commit": "c0ffee", "modified": False},
    "command": ["luyen"],
}


def run(folder: Path, config: dict[str, Any], **facts: Any) -> RunDirectory:
    manifest = {**FACTS, **facts}
    return RunDirectory.create(
        folder, config=yaml.safe_dump(config, sort_keys=False), provenance={}, manifest=manifest
    )


def changed(name: str, kind: str = "config") -> ChangedInput:
    stage = acts_on(name) if kind in ("config", "dataset") else None
    return ChangedInput(kind=kind, name=name, a=0, b=1, acts_on=stage)


def test_keys_rows_and_facts_that_differ_are_listed_in_this_order(tmp_path: Path):
    one = run(tmp_path / "a", {"trainer": {"seed": 0, "experiment_name": "a"}, "data": {"x": 1}})
    other = run(
        tmp_path / "b",
        {"trainer": {"seed": 1, "experiment_name": "b"}, "data": {}},
        versions={"python": "3.11.7", "torch": "2.14.0"},
        datasets={"train": "cd"},
        hardware={"processor": "one", "memory_bytes": 16, "gpus": []},
        command=["other"],
    )
    found = [(c.kind, c.name, c.a, c.b) for c in changed_inputs(one, other)]
    assert found == [
        ("config", "trainer.seed", 0, 1),
        ("config", "data.x", 1, ABSENT),
        ("config", "data", ABSENT, {}),
        ("dataset", "dataset.train", "ab", "cd"),
        ("versions", "versions.torch", "2.13.0", "2.14.0"),
    ]


def test_content_of_files_counts_and_their_place_does_not(tmp_path: Path):
    def files(path: str, fingerprint: str) -> dict[str, dict[str, str]]:
        return {"reward.custom_reward_function.path": {"path": path, "fingerprint": fingerprint}}

    one = run(tmp_path / "a", {}, files=files("a.py", "sha256:ab"), packages={"x": "1", "y": "1"})
    moved = run(tmp_path / "b", {}, files=files("b.py", "sha256:ab"), packages={"z": "1"})
    other = run(tmp_path / "c", {}, files=files("a.py", "sha256:cd"), packages={"x": "2"})
    older = run(tmp_path / "d", {})
    assert changed_inputs(one, moved) == []
    assert changed_inputs(one, older) == [], "what was not recorded says nothing"
    content, package = changed_inputs(one, other)
    assert (content.kind, content.a, content.b, content.acts_on) == (
        "file",
        "a.py sha256:ab",
        "a.py sha256:cd",
        "rewards",
    )
    assert (package.name, package.a, package.b) == ("packages.x", "1", "2")
    assert suspects([package, content], "rewards")[0] is content


def test_a_seed_is_named_once(tmp_path: Path):
    runs = [
        run(tmp_path / str(seed), {"trainer": {"seed": seed}}, seeds={"run": seed})
        for seed in (0, 1)
    ]
    assert [one.name for one in changed_inputs(*runs)] == ["trainer.seed"]
    same = run(tmp_path / "c", {"trainer": {"seed": 0}}, seeds={"run": 1})
    assert [one.name for one in changed_inputs(runs[0], same)] == ["seeds.run"]


def test_a_run_and_its_copy_have_the_same_inputs(tmp_path: Path):
    runs = [run(tmp_path / name, {"trainer": {"seed": 0}}) for name in "ab"]
    assert changed_inputs(*runs) == []


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path):
    runs = [run(tmp_path / name, {"trainer": {"seed": 0}}) for name in "ab"]
    runs[1].config.write_text("a: [")
    with pytest.raises(UserError, match=r"b/config\.yaml"):
        changed_inputs(*runs)


def test_what_acts_on_the_stage_is_likelier_than_what_acts_before_and_than_the_machine():
    inputs = [
        changed("trainer.logger"),
        changed("actor_rollout_ref.actor.optim.lr"),
        changed("versions.torch", "versions"),
        changed("trainer.seed"),
        changed("reward.timeout_s"),
    ]
    names = [one.name for one in suspects(inputs, "rewards")]
    assert names == [
        "reward.timeout_s",
        "trainer.seed",
        "versions.torch",
        "actor_rollout_ref.actor.optim.lr",
    ]
    assert suspects([changed("trainer.logger")], "rewards") == []


def leaves(tree: dict[str, Any], above: str = "") -> list[str]:
    found: list[str] = []
    for name, inner in tree.items():
        below = isinstance(inner, dict) and inner
        found += leaves(inner, f"{above}{name}.") if below else [f"{above}{name}"]
    return found


def test_every_key_outside_the_trainer_acts_on_a_stage():
    keys = leaves(RunConfig().model_dump(mode="json"))
    assert len(keys) > 100
    idle = [key for key in keys if acts_on(key) is None]
    assert all(key.startswith("trainer.") for key in idle), idle
    assert {acts_on(key) for key in keys} - {None} == set(STAGES)


def test_a_block_of_the_manifest_that_is_empty_is_no_difference():
    found = changed_facts({"settings": {}}, {"settings": {"MKL_CBWR": "AVX2"}})
    assert [(one.name, one.a, one.b) for one in found] == [("settings.MKL_CBWR", ABSENT, "AVX2")]
