"""A report says exactly what was not run, asked or read; what is certain is an error."""

import json
from pathlib import Path

import pytest

from luyen.cli.check import report_json, report_lines
from luyen.config.check import check, unchecked_parts
from luyen.config.machine import Machine

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
ROWS = "data.train_files=arithmetic://sum"
TURNS = "actor_rollout_ref.rollout.multi_turn"
JUDGE = "{a: {judge: {base_url: 'http://judge/v1', prompt: '{answer}'}}}"


def test_what_is_built_in_is_all_tried() -> None:
    assert list(unchecked_parts(check([], [ROWS], machine=LAPTOP).config)) == []


def test_a_report_names_every_file_server_and_model_that_was_not_tried(tmp_path: Path) -> None:
    plugin, tools, rows = (tmp_path / name for name in ("plugin.py", "tools.yaml", "rows.jsonl"))
    plugin.write_text("if True:\n    raise SystemExit(0)\n")
    tools.write_text("tools:\n  - class_name: mine.Tool\n")
    rows.write_text('{"prompt": "a"}\n')
    words = [
        f"data.train_files={rows}",
        f"trainer.plugins={plugin}",
        f"reward.components={JUDGE}",
        f"{TURNS}.enable=true",
        f"{TURNS}.tool_config_path={tools}",
        "actor_rollout_ref.model.path=nobody/nothing",
    ]
    report = check([], words, machine=LAPTOP)
    left = dict(unchecked_parts(report.config))
    assert left.keys() == {
        "data.train_files",
        "trainer.plugins.0",
        "reward.components.a",
        f"{TURNS}.tool_config_path",
        "actor_rollout_ref.model.path",
    }
    assert "mine.Tool" in left[f"{TURNS}.tool_config_path"]
    text = "\n".join(report_lines(report, [], LAPTOP))
    assert "Not tried: what is wrong here, only training shows" in text
    assert all(f"  {key}: " in text for key in left)
    listed = report_json(report)["not_tried"]
    assert json.loads(json.dumps([entry["key"] for entry in listed])) == list(left)


@pytest.mark.parametrize(
    ("word", "key", "text"),
    [
        ("server_urls=[http://127.0.0.1:1]", "server_urls", "http://127.0.0.1:1: not asked"),
        ("server.python=/bin/sh", "server.python", "whether /bin/sh has vllm is not looked up"),
    ],
)
def test_a_server_that_was_not_asked_or_started_is_named(word: str, key: str, text: str) -> None:
    rollout = "actor_rollout_ref.rollout"
    words = [ROWS, f"{rollout}.name=vllm", f"{rollout}.{word}"]
    left = dict(unchecked_parts(check([], words, machine=LAPTOP).config))
    assert left == {f"{rollout}.{key}": text}
    assert not list(unchecked_parts(check([], [*words, "trainer.stage=sft"]).config))


def test_an_offline_stage_leaves_out_what_it_does_not_use(tmp_path: Path) -> None:
    words = ["trainer.stage=sft", f"reward.components={JUDGE}", "data.train_files=a.jsonl"]
    keys = [key for key, _ in unchecked_parts(check([], words, machine=LAPTOP).config)]
    assert keys == ["data.train_files"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise RuntimeError('no')\n", "line 1 raises whenever the file is imported"),
        ("import json\nimport no_such_package\n", "line 2 imports no_such_package"),
        ("from no_such_package.part import name\n", "line 1 imports no_such_package"),
        ("adv_estimators.register('grpo')(print)\n", "`grpo` with adv_estimators"),
        ("samplers.register('mine')(a)\nsamplers.register('mine')(b)\n", "`mine` with samplers"),
    ],
)
def test_a_plugin_that_certainly_fails_is_refused(text: str, why: str, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(text)
    found = check([], [ROWS, f"trainer.plugins={plugin}"], machine=LAPTOP).problems
    [problem] = [p for p in found if p.severity == "error"]
    assert (problem.id, problem.field) == ("S12", "trainer.plugins")
    assert why in problem.why


def test_a_plugin_that_may_fail_is_not(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    text = "try:\n    import no_such_package\nexcept ImportError:\n    pass\n"
    plugin.write_text(f"{text}samplers.register('mine')(print)\n")
    assert check([], [ROWS, f"trainer.plugins={plugin}"], machine=LAPTOP).is_sound
