"""Which files a configuration names, and that their fingerprints follow their content."""

from pathlib import Path
from typing import Any

import pytest

from luyen.config.model_folder.files import model_parts
from luyen.config.named_files import module_file, named_fingerprints
from luyen.config.schema.run import RunConfig
from luyen.telemetry import fingerprints
from luyen.telemetry.fingerprints import fingerprint, fingerprint_together, source_fingerprint

TURNS = "actor_rollout_ref.rollout.multi_turn"


def config(**blocks: Any) -> RunConfig:
    return RunConfig.model_validate(blocks, strict=False)


def names(found: dict[str, dict[str, str]]) -> set[str]:
    return {name for name in found if "model.path" not in name}


def test_code_lists_and_what_stands_in_them_are_found(tmp_path: Path):
    for name in ("reward.py", "plugin.py", "sampler.py", "tools.py", "world.py", "words.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "mine.py").write_text("def f(): ...")
    listed = "tools:\n- function: mine.py:f\n- class_name: json.decoder.JSONDecoder\n"
    (tmp_path / "lists" / "tools.yaml").write_text(listed)
    multi_turn = {
        "function_tool_path": "tools.py",
        "tool_config_path": "lists/tools.yaml",
        "environments": {"w": {"kind": "class", "kwargs": {"path": "world.py", "name": "World"}}},
    }
    found = named_fingerprints(
        config(
            data={"sampler": {"class_path": "sampler.py", "class_name": "S"}},
            reward={
                "custom_reward_function": {"path": "reward.py"},
                "components": {"a": {"rule": "x", "kwargs": {"list": "words.txt", "pattern": "."}}},
            },
            trainer={"plugins": ["plugin.py"]},
            actor_rollout_ref={"rollout": {"multi_turn": multi_turn}},
        ),
        folder=tmp_path,
    )
    assert names(found) == {
        "reward.custom_reward_function.path",
        "data.sampler.class_path",
        f"{TURNS}.function_tool_path",
        "trainer.plugins.0",
        f"{TURNS}.tool_config_path",
        f"{TURNS}.tool_config_path:mine.py",
        f"{TURNS}.tool_config_path:json.decoder.JSONDecoder",
        "reward.components:words.txt",
        f"{TURNS}.environments:world.py",
    }
    assert all(entry["fingerprint"].startswith("sha256:") for entry in found.values())


def test_modules_that_named_code_imports_are_listed_beside_it(tmp_path: Path):
    code = tmp_path / "code"
    (code / "pack").mkdir(parents=True)
    (code / "reward.py").write_text("import json, yaml, near\nfrom pack import inner\n")
    (code / "near.py").write_text("def bar():\n    import later\n")
    (code / "later.py").write_text("BAR = 1\n")
    (code / "other.py").write_text("nobody imports it\n")
    (code / "pack" / "__init__.py").write_text("")
    (code / "pack" / "inner.py").write_text("this is no Python\n")
    named = config(reward={"custom_reward_function": {"path": "code/reward.py"}})
    before = named_fingerprints(named, folder=tmp_path)
    reward = "reward.custom_reward_function.path"
    modules = ("near.py", "later.py", "pack/__init__.py", "pack/inner.py")
    assert names(before) == {reward, *(f"{reward}:{module}" for module in modules)}
    (code / "later.py").write_text("BAR = 2\n")
    after = named_fingerprints(named, folder=tmp_path)
    assert [name for name in after if before[name] != after[name]] == [f"{reward}:later.py"]


def test_a_model_has_parts_and_fresh_weights_are_no_input(tmp_path: Path):
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"):
        (tmp_path / name).write_text(name)
    (tmp_path / "README.md").write_text("words")
    assert set(model_parts(str(tmp_path), Path())) == {
        "weights",
        "tokenizer",
        "template",
        "config",
    }
    model = {"path": str(tmp_path), "init": "random"}
    fresh = named_fingerprints(config(actor_rollout_ref={"model": model}), folder=Path())
    assert "actor_rollout_ref.model.path.weights" not in fresh
    before = named_fingerprints(config(actor_rollout_ref={"model": {"path": "."}}), folder=tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another")
    after = named_fingerprints(config(actor_rollout_ref={"model": {"path": "."}}), folder=tmp_path)
    assert {name for name in before if before[name] != after[name]} == {
        "actor_rollout_ref.model.path.template"
    }


def test_a_model_of_the_hub_has_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("c0ffee\n")
    assert model_parts("org/name", Path()) == {"revision": ((), "c0ffee")}
    assert model_parts("org/other", Path()) == {"revision": ((), None)}


def test_a_large_file_is_sampled_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprints, "WHOLE", 1000)
    monkeypatch.setattr(fingerprints, "BLOCK", 16)
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(2000))
    first = fingerprint(file)
    assert first.startswith("sampled:")
    assert fingerprint_together([file, file]).startswith("sampled:")
    file.write_bytes(bytes(2001))
    assert fingerprint(file) != first
    file.write_bytes(bytes(1999) + b"a")
    assert fingerprint(file) != first
    assert fingerprint(tmp_path) == "missing"


def test_the_hash_of_a_package_follows_its_sources(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1")
    first = source_fingerprint(tmp_path)
    (tmp_path / "a.pyc").write_text("compiled")
    assert source_fingerprint(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert source_fingerprint(tmp_path) != first


def test_a_module_is_found_without_being_imported():
    found = module_file("wsgiref.simple_server.make_server")
    assert found is not None
    assert found.name == "simple_server.py"
    assert module_file("no_such_package.module.Class") is None
